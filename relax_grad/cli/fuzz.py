"""``relax-grad fuzz`` differentiates random programs, or compiles random TIR, and compares with
references."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from . import _arguments
from ._text import EXIT_CODES, PASSES, count_of, print_json, version_table, versions

if TYPE_CHECKING:  # the command imports them when it runs
    from ..testing.fuzz.session import Counts, Finding

_DESCRIPTION = """\
Draws random Relax programs of all differentiable operators, differentiates and compiles them, and
compares the gradients with central differences in float64 and, where it is installed, with
PyTorch's. A failing program is made smaller and printed as TVMScript.

With --tir the programs call random TIR functions. They are compiled by relax_grad.pipeline and by
TVM's pipeline, and their results are compared with NumPy."""

_EPILOG = """\
examples:
  relax-grad fuzz --minutes 5                 programs of seed 0 for five minutes
  relax-grad fuzz --programs 100 --seed 7     a hundred programs of seed 7
  relax-grad fuzz --keep findings             write each finding to a script
  relax-grad fuzz --tir --minutes 10          random TIR functions, compiled by the pipeline

""" + EXIT_CODES.format(success="no findings", problem="a program failed")

#: The seconds between progress lines if the output is not a terminal.
_INTERVAL = 60.0


def add_parser(commands: argparse._SubParsersAction) -> None:
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
        type=_arguments.positive(float),
        metavar="N",
        help="the time limit in minutes (default: 1, or none with --programs)",
    )
    parser.add_argument(
        "--programs", type=_arguments.positive(int), metavar="N", help="the number of programs"
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
    _arguments.add_json(parser)
    _arguments.add_verbose(parser)
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
    start, code, findings = time.monotonic(), 0, []
    stream = sys.stderr if args.json else sys.stdout
    with _output(stream) as (write, begin, wait):
        write(f"{versions()}, {subject.title}, seed {args.seed}")
        write(f"compared with {subject.against}")
        session = Session(args.seed, subject, lambda text: begin(text, session.counts), wait)
        try:
            for finding in session.run(start + 60 * minutes, args.programs):
                findings.append(_object(finding, subject, args.seed))
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
    seconds = time.monotonic() - start
    for line in _summary(session.counts, subject, seconds):
        print(line, file=stream)
    if args.json:
        counts = session.counts
        print_json(
            {
                "versions": version_table(),
                "seed": args.seed,
                "programs": counts.programs,
                "statements": counts.statements,
                "compared": {key: counts.compared[key] for key in subject.references},
                "findings": findings,
                "seconds": seconds,
                "interrupted": code == 130,
            }
        )
    return code or (1 if session.counts.findings else 0)


def _object(finding: Finding, subject: Any, seed: int) -> dict:
    """Return a finding as an object of JSON; docs/checking.md lists its keys."""
    return {
        "program": finding.number,
        "kind": finding.failure.kind,
        "message": finding.failure.message,
        "source": subject.source(finding),
        "script": subject.script(finding, seed),
    }


def _subject(args: argparse.Namespace) -> Any:
    """Return the kind of programs that the command line asks for."""
    if args.tir:
        from ..testing.fuzz.tir.subject import Tir

        return Tir()
    from ..testing.fuzz.checks import Settings
    from ..testing.fuzz.gradients import Gradients

    return Gradients(Settings(args.through or "relax_grad", args.pipeline))


def _summary(counts: Counts, subject: Any, seconds: float) -> Iterator[str]:
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
def _output(stream: TextIO) -> Iterator[tuple[Callable, Callable, Callable]]:
    """Yield functions that write a line, announce the next step, and show the time while a step
    runs."""
    if not (stream.isatty() and importlib.util.find_spec("rich")):
        yield (
            (lambda line, style=None: print(line, file=stream, flush=True)),
            _at_intervals(stream),
            (lambda: None),
        )
        return

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(file=stream, highlight=False)
    # A refresh thread could hold locks at a fork, for which the child would wait forever.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=None)

        def write(line: str, style: str | None = None) -> None:
            progress.console.print(line, style=style, markup=False, soft_wrap=True)

        def begin(text: str, counts: Counts) -> None:
            progress.update(task, description=f"{_so_far(counts)}; {text}")
            progress.refresh()

        yield write, begin, progress.refresh


def _at_intervals(stream: TextIO) -> Callable[..., None]:
    """Return a function that prints the progress: the first program, then once per
    :data:`_INTERVAL`."""
    said = None

    def begin(text: str, counts: Counts) -> None:
        nonlocal said
        now = time.monotonic()
        if said is None or now - said >= _INTERVAL:
            said = now
            print(f"{_so_far(counts)}; {text}", file=stream, flush=True)

    return begin


def _so_far(counts: Counts) -> str:
    return f"{counts.programs} done, {count_of(counts.findings, 'finding')}"
