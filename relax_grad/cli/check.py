"""``relax-grad check`` checks the gradients of the installed TVM build."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from .._packages import is_usable, load
from . import _arguments
from ._text import EXIT_CODES, PASSES, count_of, last_line, print_json, version_table, versions

if TYPE_CHECKING:
    import tvm

    from ..testing.samples import Sample

#: The seconds between lines of progress if the output is not a terminal.
_INTERVAL = 10.0

_EPILOG = """\
examples:
  relax-grad check                        every operator, at each sample's highest order
  relax-grad check conv2d nn.max_pool2d   two operators
  relax-grad check 'grad.*' --order 1     the backward operators, first order only
  relax-grad check --all                  every dtype, symbolic shapes, and PyTorch if installed
  relax-grad check --through tvm          differentiated by relax.transform.Gradient

""" + EXIT_CODES.format(success="every check passed", problem="a check failed")


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0 if every check passed, 1 if one failed, 130 if interrupted."""
    try:
        operators = select(args.operators)
        args.target = _arguments.target_of(args.target)
    except ValueError as error:
        args.error(str(error))
    if args.list:
        if args.json:
            print_json({"versions": version_table(), "operators": operators})
        else:
            print("\n".join(operators))
        return 0
    if args.torch:
        try:
            load("torch", "--torch")
        except ImportError as error:
            args.error(str(error))
    args.torch = args.torch or (args.all and is_usable("torch"))
    return _check(operators, args)


def select(patterns: Sequence[str]) -> list[str]:
    """Return the operators with samples that match the patterns, each once; all of them without
    patterns.

    Parameters
    ----------
    patterns : Sequence[str]
        Names with or without the prefixes before a dot (``"relax.nn.conv2d"``, ``"nn.conv2d"``,
        ``"conv2d"``). ``*`` stands for any characters and ``?`` for any one character.

    Raises
    ------
    ValueError
        If a pattern matches no operator; the message suggests similar names.
    """
    from ..testing.samples import sampled_operators

    known = sampled_operators()
    return _arguments.select(patterns, known, lambda pattern: _no_such_operator(pattern, known))


@dataclass
class Outcome:
    """The results of the checks of one operator.

    Attributes
    ----------
    operator : str
        The operator's name.
    samples : int
        The number of samples with at least one check.
    skipped : int
        The number of samples that only PyTorch can check and that were not compared with it.
    order : int
        The highest checked order.
    max_error : float
        The largest relative error of the checks that passed.
    seconds : float
        The time of all checks.
    failures : list[tuple[str, Exception]]
        The name and the exception of each check that failed.
    """

    operator: str
    samples: int = 0
    skipped: int = 0
    order: int = 0
    max_error: float = 0.0
    seconds: float = 0.0
    failures: list[tuple[str, Exception]] = field(default_factory=list)

    def record(self, name: str, check: Callable[[], tuple[float, int]]) -> None:
        """Run a check that returns its error and its order, and record the result or the
        failure."""
        try:
            error, order = check()
        except Exception as exception:
            self.failures.append((name, exception))
        else:
            self.max_error = max(self.max_error, error)
            self.order = max(self.order, order)

    @property
    def verdict(self) -> str:
        """``"ok"``, ``"failed"``, or ``"skipped"`` if no sample has a check."""
        return "failed" if self.failures else "ok" if self.samples else "skipped"

    def line(self, width: int) -> str:
        """Return the report of the operator in one line, with its name padded to ``width``."""
        count = count_of(self.samples, "sample")
        order = f"order {self.order}" if self.order else "-"
        error = f"max error {self.max_error:.1e}" if self.order else "-"
        verdict = "FAILED" if self.failures else self.verdict
        if self.skipped and self.samples:
            verdict += f" ({self.skipped} skipped)"
        return (
            f"{self.operator:<{width}}  {count:>10}  {order:<7}  {error:<17}  "
            f"{self.seconds:6.1f} s  {verdict}"
        )


def check_operator(
    operator: str,
    *,
    through: str = "relax_grad",
    target: str | tvm.target.Target = "llvm",
    order: int | None = None,
    all_kinds: bool = False,
    torch: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    begin: Callable[[str], None] = lambda check: None,
) -> Outcome:
    """Check the samples of an operator; the other checks run even if one fails.

    Parameters
    ----------
    operator : str
        The name of an operator that has samples.
    through : str
        The differentiation pass, ``"relax_grad"`` or ``"tvm"``, as in ``check_gradients``. With
        ``"tvm"``, bfloat16 is skipped, and a sample is checked up to the order that this pass
        supports.
    target : str or tvm.target.Target
        The compilation target.
    order : int, optional
        The highest order to check; by default each sample's own.
    all_kinds : bool
        Whether to check the sample's other dtypes and its symbolic shapes too.
    torch : bool
        Whether to compare the samples that have a PyTorch reference with it.
    interrupted : Callable[[], bool]
        Tells whether to stop; called after each check.
    begin : Callable[[str], None]
        Called before each check with its place and its kind, such as ``"sample 2 of 9, float64"``.

    Raises
    ------
    KeyboardInterrupt
        If ``interrupted`` returns true.
    """
    from ..testing.samples import samples

    outcome = Outcome(operator)
    start = time.perf_counter()
    begin("samples")
    try:
        members = samples(operator)
    except Exception as error:
        members = []
        outcome.failures.append(("making the samples", error))
    for index, sample in enumerate(members):
        name = f"sample {index}" + (f" ({sample.note})" if sample.note else "")
        cap = sample.order if order is None else min(order, sample.order)
        checks = list(_checks(sample, through, target, cap, all_kinds, torch=torch))
        outcome.samples += bool(checks)
        outcome.skipped += not checks
        for kind, check in checks:
            begin(f"sample {index + 1} of {len(members)}, {kind}")
            outcome.record(f"{name}, {kind}", check)
            if interrupted():
                raise KeyboardInterrupt
    outcome.seconds = time.perf_counter() - start
    return outcome


def _checks(
    sample: Sample,
    through: str,
    target: str | tvm.target.Target,
    order: int,
    all_kinds: bool,
    torch: bool,
) -> Iterator[tuple[str, Callable[[], tuple[float, int]]]]:
    """Yield the kind of each check of a sample, and a function that runs it and returns error and
    order."""
    from ..testing import check_against_torch

    def gradients(**settings: Any) -> tuple[float, int]:
        report = sample.check(order=order, through=through, target=target, **settings)
        return report.max_error, report.order

    def parity() -> tuple[float, int]:
        error = check_against_torch(
            sample.function or sample.op,
            sample.inputs,
            sample.torch,  # type: ignore[arg-type]  # only for samples with a function of PyTorch
            wrt=sample.wrt,
            through=through,
            target=target,
            **sample.attrs,
        )
        return error, 1

    if sample.smooth:
        yield "float64", gradients
        if all_kinds:
            for dtype in sample.dtypes:
                if dtype == "bfloat16" and through == "tvm":
                    continue  # TVM's pass does not support it
                yield dtype, partial(gradients, dtype=dtype)
            if sample.symbolic:
                yield "symbolic shape", partial(gradients, symbolic=True)
    if torch and sample.torch is not None:
        yield "PyTorch", parity


def _check(operators: Sequence[str], args: argparse.Namespace) -> int:
    width = max(map(len, operators), default=0)
    outcomes = []
    start = time.perf_counter()
    stream = sys.stderr if args.json else sys.stdout
    with _interrupts() as interrupted, _output(len(operators), stream) as (write, begin):
        write(f"{versions()}, through {args.through}, target {args.target.kind.name}")
        for done, operator in enumerate(operators):
            outcome = check_operator(
                operator,
                through=args.through,
                target=args.target,
                order=args.order,
                all_kinds=args.all,
                torch=args.torch,
                interrupted=interrupted,
                begin=partial(begin, done, operator),
            )
            outcomes.append(outcome)
            write(outcome.line(width), "red" if outcome.failures else None)
            for name, error in outcome.failures:
                write(f"    {name}: {_message(error, args.verbose)}")
    seconds = time.perf_counter() - start
    for line in _summary(outcomes, seconds, everything=not args.operators):
        print(line, file=stream)
    if args.json:
        print_json(
            {
                "versions": version_table(),
                "through": args.through,
                "target": str(args.target),
                "operators": [_object(outcome) for outcome in outcomes],
                "unsampled": [] if args.operators else _unsampled(),
                "seconds": seconds,
            }
        )
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def _summary(outcomes: Sequence[Outcome], seconds: float, everything: bool) -> Iterator[str]:
    failed = sum(bool(outcome.failures) for outcome in outcomes)
    skipped = sum(outcome.skipped for outcome in outcomes)
    count = sum(outcome.samples for outcome in outcomes)
    yield ""
    if skipped:
        yield (
            f"Skipped {count_of(skipped, 'sample')} at a kink, where finite differences are not "
            "valid: --torch compares with PyTorch."
        )
    unsampled = _unsampled() if everything else []
    if unsampled:
        yield f"Not checked, as their rules have no samples: {', '.join(unsampled)}."
    verdict = f"{count_of(failed, 'operator')} FAILED" if failed else "all ok"
    yield (
        f"{count_of(len(outcomes), 'operator')}, {count_of(count, 'sample')}, {seconds:.0f} s: "
        f"{verdict}"
    )


def _unsampled() -> list[str]:
    """Return the differentiable operators that no sample checks."""
    from ..registry import is_backward_operator
    from ..testing.samples import sampled_operators

    known = set(sampled_operators())
    # Order 2 of the forward operators checks the backward operators without samples.
    return [
        name for name in _differentiable() if name not in known and not is_backward_operator(name)
    ]


def _object(outcome: Outcome) -> dict:
    """Return the outcome as an object of JSON; docs/checking.md lists its keys."""
    return {
        "operator": outcome.operator,
        "verdict": outcome.verdict,
        "samples": outcome.samples,
        "skipped": outcome.skipped,
        "order": outcome.order,
        "max_error": outcome.max_error,
        "seconds": outcome.seconds,
        "failures": [
            {"check": name, "error": type(error).__name__, "message": str(error).strip()}
            for name, error in outcome.failures
        ],
    }


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether the user has pressed Ctrl-C.

    Python's KeyboardInterrupt is not enough: TVM turns one raised in a rule, or in another callback
    from TVM, into a RuntimeError.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread may handle signals
        return

    received = []

    def interrupt(signum: int, frame: object) -> None:
        received.append(signum)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _output(total: int, stream: TextIO) -> Iterator[tuple[Callable, Callable]]:
    """Yield a function that writes a line to a stream, and one that announces the next check.

    That takes the number of operators that are done, the operator and the check. Without a bar, a
    check that begins a while after the last line is a line too.
    """
    if not (stream.isatty() and importlib.util.find_spec("rich")):
        last = time.monotonic()

        def write_plain(line: str, style: str | None = None) -> None:
            nonlocal last
            last = time.monotonic()
            print(line, file=stream, flush=True)

        def begin_plain(done: int, operator: str, check: str) -> None:
            if time.monotonic() - last >= _INTERVAL:
                write_plain(f"    {done} of {total} done; {operator}: {check}")

        yield write_plain, begin_plain
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(file=stream, highlight=False)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def write(line: str, style: str | None = None) -> None:
            progress.console.print(line, style=style, markup=False, soft_wrap=True)

        def begin(done: int, operator: str, check: str) -> None:
            progress.update(task, completed=done, description=f"{operator}: {check}")

        yield write, begin


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser's subcommands."""
    check = commands.add_parser(
        "check",
        help="check gradients numerically against this TVM build",
        description="Differentiates, compiles and runs samples of each operator, and compares the "
        "gradients with central differences in float64.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument(
        "operators",
        nargs="*",
        metavar="OPERATOR",
        help=f"an operator to check: {_arguments.OPERATORS}",
    )
    check.add_argument(
        "--through",
        choices=PASSES,
        default="relax_grad",
        help=(
            "the differentiation pass: relax_grad.transform.Gradient, or TVM's, which is checked "
            "without bfloat16 and some symbolic second orders (default: relax_grad)"
        ),
    )
    check.add_argument(
        "--target",
        default="llvm",
        help="the target to compile for, as a name or in JSON, or host: the processor of this "
        "machine (default: llvm)",
    )
    check.add_argument(
        "--order",
        type=_order,
        metavar="N",
        help="the highest order to check (default: each sample's own, mostly 2)",
    )
    check.add_argument(
        "--all",
        action="store_true",
        help="check the other dtypes and symbolic shapes too, and compare with PyTorch if it is "
        "installed",
    )
    check.add_argument(
        "--torch",
        action="store_true",
        help="compare with PyTorch too; the only check of a sample at a kink",
    )
    check.add_argument(
        "--list", action="store_true", help="list the operators without checking them"
    )
    _arguments.add_json(check)
    _arguments.add_verbose(check, ", and the traceback of every failure")
    check.set_defaults(run=run, error=check.error)


def _order(text: str) -> int:
    order = int(text)
    if order < 1:
        raise argparse.ArgumentTypeError(f"the order must be at least 1, but it is {text}")
    return order


def _differentiable() -> list[str]:
    from ..registry import classify, operators

    return [name for name in operators() if classify(name).kind == "differentiable"]


def _no_such_operator(pattern: str, known: Sequence[str]) -> str:
    from ..registry import classify, is_backward_operator, operators

    if "," in pattern:
        return f"no operator {pattern!r}; separate names by spaces: {pattern.replace(',', ' ')}"
    for found in (classify(name) for name in operators() if _arguments.fits(name, pattern)):
        if found.kind == "non-differentiable":
            return f"{found.op_name} has no gradient to check: {found.reason}"
    without_samples = [name for name in _differentiable() if _arguments.fits(name, pattern)]
    if without_samples:
        name = without_samples[0]
        reason = f"{name} has a gradient rule, but its rule has no samples"
        if is_backward_operator(name):
            reason += "; order 2 of its forward operator's samples checks it"
        return reason
    return _arguments.no_such_operator(
        pattern,
        known,
        "--list shows the operators; relax_grad.testing.check_gradients checks yours",
    )


def _message(error: Exception, verbose: bool) -> str:
    if verbose:
        return "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {last_line(error)}"
