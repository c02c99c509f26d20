"""``relax-grad cache`` shows and clears the directory of compiled programs and functions."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import _arguments
from ._text import EXIT_CODES, count_of, print_json, version_table

if TYPE_CHECKING:
    from ..cpu.codegen.directory import Directory, Entry

_DESCRIPTION = """\
Shows the directory in which relax_grad keeps compiled programs and functions, so that a later
process does not compile them again. RELAX_GRAD_CACHE names another directory, and
RELAX_GRAD_CACHE=0 turns the cache off. If the directory exceeds its limit after a compilation, the
entries that were not used for the longest time are deleted."""

_EPILOG = """\
examples:
  relax-grad cache        the directory, its size and its limit
  relax-grad cache list   each entry, the last used first
  relax-grad cache clear  delete all entries

""" + EXIT_CODES.format(
    success="the directory can be used, or the cache is off",
    problem="another user may write to the directory, or an entry cannot be deleted",
)

#: The narrowest column of the names of functions.
_NARROWEST = 30

#: The units of sizes, from the largest.
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "cache",
        help="show or clear the directory of compiled programs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("size", "list", "clear"),
        default="size",
        help="show the size (the default), list the entries, or delete them",
    )
    _arguments.add_json(parser)
    # Nothing here needs TVM, whose import takes seconds.
    parser.set_defaults(run=run, error=parser.error, verbose=True, needs_tvm=False)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if the directory cannot be used or cleared."""
    from ..cpu.codegen.cache import of_environment

    directory, problem = of_environment()
    if directory is None:
        report: dict[str, object] = {"directory": None, "problem": problem}
        _show(
            report,
            [problem or "the cache is off: RELAX_GRAD_CACHE is 0, or there is no home"],
            args,
        )
        return 0 if problem is None else 1
    reason = directory.refusal()
    report = {"directory": str(directory.path), "limit": directory.max_bytes, "problem": reason}
    lines = [] if reason is None else [f"not used: {reason}"]
    if args.action == "clear" and reason is not None:
        lines.append("not cleared: its links may lead to other files; delete it yourself")
    elif args.action == "clear":
        try:
            freed = directory.clear()
        except OSError as error:
            report["problem"] = str(error)
            _show(report, [f"could not delete every entry: {error}"], args)
            return 1
        report["freed"] = freed
        lines.append(f"deleted {_size(freed)} from {directory.path}")
    else:
        entries = sorted(directory.entries(), key=lambda entry: -entry.used)
        report.update(_summary(entries))
        if args.action == "list":
            report["entries"] = [_described(entry) for entry in entries]
            lines += map(_line, entries)
        lines += _totals(directory, entries)
    _show(report, lines, args)
    return 0 if report["problem"] is None else 1


def _summary(entries: Sequence[Entry]) -> dict[str, int]:
    programs = sum(entry.is_program for entry in entries)
    return {
        "bytes": sum(entry.size for entry in entries),
        "programs": programs,
        "objects": len(entries) - programs,
    }


def _totals(directory: Directory, entries: Sequence[Entry]) -> list[str]:
    summary = _summary(entries)
    limit = "" if directory.max_bytes is None else f" of at most {_size(directory.max_bytes)}"
    return [
        f"{directory.path}: {_size(summary['bytes'])}{limit}, "
        f"{count_of(summary['programs'], 'program')} and "
        f"{count_of(summary['objects'], 'object file')}"
    ]


def _described(entry: Entry) -> dict[str, object]:
    return {
        "path": str(entry.path),
        "kind": _kind(entry),
        "functions": entry.description,
        "bytes": entry.size,
        "used": entry.used,
    }


def _line(entry: Entry) -> str:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
    start = f"{used}  {_size(entry.size):>9}  {_kind(entry):<11}  "
    room = max(_NARROWEST, shutil.get_terminal_size((100, 24)).columns - len(start))
    names = entry.description
    return start + (names if len(names) <= room else f"{names[: room - 3]}...")


def _kind(entry: Entry) -> str:
    return "program" if entry.is_program else "object file"


def _size(number: int) -> str:
    """Return a number of bytes with a unit."""
    for unit, size in _UNITS:
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def _show(report: dict[str, object], lines: Sequence[str], args: argparse.Namespace) -> None:
    if args.json:
        print_json({"versions": version_table(), **report})
    else:
        print("\n".join(lines))
