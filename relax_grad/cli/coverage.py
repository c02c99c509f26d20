"""``relax-grad coverage`` lists the status of the gradient of every operator."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ._text import count_of, versions

if TYPE_CHECKING:
    from ..coverage import OperatorCoverage

_HEADER = ("operator", "gradient", "rule", "arguments", "note")

_DESCRIPTION = """\
Lists every Relax operator of the installed TVM: whether it has a gradient, the origin of its rule,
the arguments with a gradient, and the reason for an operator without one."""

_EPILOG = """\
exit codes:
  0  every operator is classified
  1  an operator of this TVM is unknown to relax_grad
"""


def add_parser(commands) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "coverage",
        help="list the operators with a gradient, and the reasons for those without one",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    form.add_argument("--json", action="store_true", help="print a list of objects in JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if an operator is unclassified."""
    from ..coverage import coverage

    found = coverage()
    if args.json:
        print(json.dumps([_object(item) for item in found], indent=2))
    else:
        lines = _markdown(found) if args.markdown else _text(found)
        print("\n".join(lines))
    return 1 if any(item.classification.kind == "unclassified" for item in found) else 0


def row(item: OperatorCoverage) -> tuple[str, ...]:
    """Return the cells of an operator's row: operator, gradient, rule, arguments and note."""
    found = item.classification
    if found.kind != "differentiable":
        absent = "refused" if found.refused else "none"
        kind = "unclassified" if found.kind == "unclassified" else absent
        return found.op_name, kind, found.rule or "", "", found.reason or ""
    note = f"replaces TVM's, which {found.corrects}" if found.corrects else ""
    return found.op_name, "yes", found.rule, ", ".join(item.arguments), note


def _object(item: OperatorCoverage) -> dict:
    found = item.classification
    return {
        "operator": found.op_name,
        "kind": found.kind,
        "rule": found.rule,
        "arguments": list(item.arguments),
        "reason": found.reason,
        "refused": found.refused,
        "corrects": found.corrects,
    }


def _text(found: Sequence[OperatorCoverage]) -> Iterator[str]:
    rows = [_HEADER, *map(row, found)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(_HEADER) - 1)]
    yield versions()
    yield ""
    for cells in rows:
        columns = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        yield "  ".join((*columns, cells[-1])).rstrip()
    yield ""
    yield summary(found)


def _markdown(found: Sequence[OperatorCoverage]) -> Iterator[str]:
    def line(cells):
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    yield line(_HEADER)
    yield "|" + "---|" * len(_HEADER)
    for item in found:
        name, *cells = row(item)
        yield line((f"`{name}`", *cells))
    yield ""
    yield summary(found)


def summary(found: Sequence[OperatorCoverage]) -> str:
    """Return the number of operators of each kind, in one sentence."""
    kinds = Counter(item.classification.kind for item in found)
    return f"{count_of(len(found), 'operator')}: " + ", ".join(
        f"{kinds[kind]} {kind}" for kind in ("differentiable", "non-differentiable", "unclassified")
    )
