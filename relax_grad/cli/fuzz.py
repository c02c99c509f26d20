"""``relax-grad fuzz`` differentiates random programs, or compiles random TIR, and compares with references."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from ._text import PASSES, count_of, versions

_DESCRIPTION = """\
Draws random Relax programs of all differentiable operators, differentiates and compiles them, and compares the
gradients with central differences in float64 and, where it is installed, with PyTorch's. A failing program is
made smaller and printed as TVMScript.

With --tir the programs call random TIR functions. They are compiled by relax_grad.pipeline and by TVM's pipeline, and
their results are compared with NumPy."""

_EPILOG = """\
examples:
  relax-grad fuzz --minutes 5                 programs of seed 0 for five minutes
  relax-grad fuzz --programs 100 --seed 7     a hundred programs of seed 7
  relax-grad fuzz --keep findings             write each finding to a script
  relax-grad fuzz --tir --minutes 10          random TIR functions, compiled by the pipeline

exit codes:
  0  no findings       2    the command line is wrong
  1  a program failed  130  interrupted
"""

#: The seconds between progress lines if the output is not a terminal.
_INTERVAL = 60.0


def add_parser(commands) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "fuzz",
        help="differentiate random programs, and compare with finite differences and PyTorch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes",
        type=_positive(float),
        metavar="N",
        help="the time limit in minutes (default: 1, or none with --programs)",
    )
    parser.add_argument(
        "--programs", type=_positive(int), metavar="N", help="the number of programs"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the seed of the random programs (default: 0)",
    )
    parser.add_argument(
        "--through",
        choices=PASSES,
        help=(
            "the differentiation pass (default: relax_grad); TVM's receives only programs that it "
            "supports"
        ),
    )
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="compile by relax_grad.pipeline too, in float32, and compare with TVM's pipeline",
    )
    parser.add_argument(
        "--tir",
        action="store_true",
        help="compile random TIR functions by relax_grad.pipeline, and compare with NumPy",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="write each finding to a script in this folder"
    )
    parser.set_defaults(run=run, error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0 without findings, 1 with findings, 130 if interrupted."""
    from ..testing.fuzz import report
    from ..testing.fuzz.session import Session, can_fork

    if not can_fork():
        args.error("fuzz needs a system that can fork processes, such as Linux")
    if args.tir and (args.through or args.pipeline):
        args.error("--tir does not differentiate, and always compiles by the pipeline")
    if args.keep is not None:
        try:
            args.keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            args.error(f"argument --keep: cannot make the folder {args.keep}: {error.strerror}")
    minutes = args.minutes or (float("inf") if args.programs else 1)
    subject = _subject(args)
    start, code = time.monotonic(), 0
    with _output() as (write, begin):
        write(f"{versions()}, {subject.title}, seed {args.seed}")
        write(f"compared with {subject.against}")
        session = Session(args.seed, subject, lambda text: begin(text, session.counts))
        try:
            for finding in session.run(start + 60 * minutes, args.programs):
                write("")
                write(report.summary(finding, subject.size), "red")
                write(subject.source(finding))
                if args.keep is not None:
                    path = args.keep / f"seed_{args.seed}_program_{finding.number}.py"
                    path.write_text(subject.script(finding, args.seed), encoding="utf-8")
                    write(f"written to {path}")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
    for line in _summary(session.counts, subject, time.monotonic() - start):
        print(line)
    return code or (1 if session.counts.findings else 0)


def _subject(args: argparse.Namespace):
    """Return the kind of programs that the command line asks for."""
    if args.tir:
        from ..testing.fuzz.tir.subject import Tir

        return Tir()
    from ..testing.fuzz.checks import Settings
    from ..testing.fuzz.gradients import Gradients

    return Gradients(Settings(args.through or "relax_grad", args.pipeline))


def _summary(counts, subject, seconds: float):
    preposition, noun = subject.part
    yield ""
    yield (
        f"{count_of(counts.programs, 'program')} of {count_of(counts.statements, 'statement')}, "
        f"{preposition} {count_of(len(counts.parts), noun)}"
    )
    for key, name in subject.references.items():
        yield f"  compared with {name}: {counts.compared[key]}"
    verdict = count_of(counts.findings, "finding") if counts.findings else "no findings"
    yield f"{seconds:.0f} s: {verdict}"


@contextmanager
def _output():
    """Yield a function that writes a line, and one that announces the next step."""
    if not (sys.stdout.isatty() and importlib.util.find_spec("rich")):
        yield (lambda line, style=None: print(line, flush=True)), _at_intervals()
        return

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(highlight=False)
    # A refresh thread could hold locks at a fork, for which the child would wait forever.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=None)

        def write(line: str, style: str | None = None) -> None:
            progress.console.print(line, style=style, markup=False, soft_wrap=True)

        def begin(text: str, counts) -> None:
            progress.update(task, description=f"{_so_far(counts)}; {text}")
            progress.refresh()

        yield write, begin


def _at_intervals():
    """Return a function that prints the progress, at most once per :data:`_INTERVAL`."""
    said = time.monotonic()

    def begin(text: str, counts) -> None:
        nonlocal said
        if time.monotonic() - said >= _INTERVAL:
            said = time.monotonic()
            print(f"{_so_far(counts)}; {text}", flush=True)

    return begin


def _so_far(counts) -> str:
    return f"{counts.programs} done, {count_of(counts.findings, 'finding')}"


def _positive(kind):
    def convert(text: str):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"it must be positive, not {text}")
        return value

    convert.__name__ = kind.__name__
    return convert
