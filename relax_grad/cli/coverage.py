"""``relax-grad coverage`` lists the status of the gradient of every operator."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from . import _arguments
from ._text import EXIT_CODES, count_of, print_json, versions

if TYPE_CHECKING:
    from ..coverage import OperatorCoverage

_HEADER = ("operator", "gradient", "rule", "arguments", "note")

#: The fewest and the most columns of the table, and those without a terminal.
_COLUMNS = 80, 120, 100

#: The widest column of names. The other cells of a longer name begin on the next line.
_NAMES = 36

_DESCRIPTION = """\
Lists every Relax operator of the installed TVM, or those that are named: whether it has a gradient,
the arguments with a gradient, the origin of a rule that is not relax_grad's, and the reason for an
operator without a gradient. The faults of TVM's rules that relax_grad replaces are shown for named
operators, and with --verbose."""

_EPILOG = """\
examples:
  relax-grad coverage                    every operator
  relax-grad coverage conv2d 'nn.*pool*' some operators
  relax-grad coverage --json             for programs

""" + EXIT_CODES.format(
    success="every listed operator is classified",
    problem="an operator of this TVM is unknown to relax_grad",
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "coverage",
        help="list the operators with a gradient, and the reasons for those without one",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "operators",
        nargs="*",
        metavar="PATTERN",
        help=f"an operator to list: {_arguments.OPERATORS}",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    _arguments.add_json(form)
    _arguments.add_verbose(parser, ", and the faults of the rules that relax_grad replaces")
    parser.set_defaults(run=run, error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if an operator is unclassified."""
    items = _items(args)
    if args.json:
        print_json([_object(item) for item in items])
    else:
        lines = (
            _markdown(items)
            if args.markdown
            else _text(items, _width(), bool(args.verbose or args.operators))
        )
        print("\n".join(lines))
    return 1 if any(item.classification.kind == "unclassified" for item in items) else 0


def _items(args: argparse.Namespace) -> list[OperatorCoverage]:
    from .. import coverage
    from ..registry import operators

    if not args.operators:
        return coverage.coverage()
    known = operators()
    hint = "relax-grad coverage lists the operators"
    try:
        names = _arguments.select(
            args.operators,
            known,
            lambda pattern: _arguments.no_such_operator(pattern, known, hint),
        )
    except ValueError as error:
        args.error(str(error))
    return [coverage.coverage_of(name) for name in names]


def row(item: OperatorCoverage) -> tuple[str, ...]:
    """Return the cells of an operator's row: operator, gradient, rule, arguments and note."""
    status = item.classification
    if status.kind != "differentiable":
        absent = "refused" if status.refused else "none"
        kind = "unclassified" if status.kind == "unclassified" else absent
        return status.op_name, kind, status.rule or "", "", status.reason or ""
    note = f"replaces TVM's, which {status.corrects}" if status.corrects else ""
    return status.op_name, "yes", status.rule or "", ", ".join(item.arguments), note


def _object(item: OperatorCoverage) -> dict:
    status = item.classification
    return {
        "operator": status.op_name,
        "kind": status.kind,
        "rule": status.rule,
        "arguments": list(item.arguments),
        "reason": status.reason,
        "refused": status.refused,
        "corrects": status.corrects,
    }


def _width() -> int:
    """Return the columns of the table: the terminal's, within :data:`_COLUMNS`."""
    fewest, most, otherwise = _COLUMNS
    return min(max(shutil.get_terminal_size((otherwise, 24)).columns, fewest), most)


def _text(items: Sequence[OperatorCoverage], width: int, with_faults: bool) -> Iterator[str]:
    rows = [("operator", "gradient", "arguments with a gradient, or the reason for its absence")]
    rows += [_cells(item, with_faults) for item in items]
    names = min(max(len(name) for name, _, _ in rows), _NAMES)
    kinds = max(len(kind) for _, kind, _ in rows)
    indent = " " * (names + 2)
    yield versions()
    yield ""
    for name, kind, text in rows:
        first, *others = textwrap.wrap(text, width - names - kinds - 4) or [""]
        if len(name) > names:
            yield name
            name = ""
        yield f"{name:<{names}}  {kind:<{kinds}}  {first}".rstrip()
        for line in others:
            yield f"{indent}{'':<{kinds}}  {line}"
    yield ""
    yield summary(items)


def _cells(item: OperatorCoverage, with_faults: bool) -> tuple[str, str, str]:
    name, kind, rule, arguments, note = row(item)
    if kind != "yes":
        return name, kind, note
    parts = [arguments, "" if rule == "relax_grad" else f"by {rule}", note if with_faults else ""]
    return name, kind, "; ".join(filter(None, parts))


def _markdown(items: Sequence[OperatorCoverage]) -> Iterator[str]:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    yield line(_HEADER)
    yield "|" + "---|" * len(_HEADER)
    for item in items:
        name, *cells = row(item)
        yield line((f"`{name}`", *cells))
    yield ""
    yield summary(items)


def summary(items: Sequence[OperatorCoverage]) -> str:
    """Return the number of operators and of backward operators of each kind, in one sentence."""
    from ..registry import is_backward_operator

    kinds: dict[str, list[str]] = {"operator": [], "backward operator": []}
    for item in items:
        entry = item.classification
        is_backward = is_backward_operator(entry.op_name)
        kinds["backward operator" if is_backward else "operator"].append(entry.kind)
    return "; ".join(_counts(noun, found) for noun, found in kinds.items() if found)


def _counts(noun: str, kinds: Sequence[str]) -> str:
    """Return the number of operators of each kind."""
    numbers = Counter(kinds)
    return f"{count_of(len(kinds), noun)}: " + ", ".join(
        f"{numbers[kind]} {kind}"
        for kind in ("differentiable", "non-differentiable", "unclassified")
    )
