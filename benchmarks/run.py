"""Run a benchmark: ``python benchmarks/run.py NAME``.

A benchmark measures rows one after the other, and prints the figures of each. ``--only`` chooses
rows, and ``--list`` prints their names. ``--json`` stores the figures in the file that the
documentation is made of, or in another one; rows of the file that are not measured stay, if they
are of the same machine. ``run.py NAME --help`` lists further options.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _benchmark import (
    HERE,
    MEASURED,
    Benchmark,
    Rows,
    facts,
    file_of_machine,
    shares_machine,
    shown,
    text,
)

#: The variables of the number of threads of TVM, PyTorch and JAX. XLA has no other option for it.
_THREADS = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PJRT_NPROC")

#: Benchmarks of one thread, if ``--threads`` does not say otherwise.
_ONE_THREAD = ("candidates", "web", "written_out")

#: Options of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def names() -> dict[str, str]:
    """Return the first line of the docstring of each benchmark, by name."""
    paths = [path for path in sorted(HERE.glob("[a-z]*.py")) if path.stem != "run"]
    docs = [ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "" for path in paths]
    return {path.stem: doc.partition("\n")[0] for path, doc in zip(paths, docs, strict=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    listed = names()
    if not arguments or arguments[0] not in listed:
        lines = "\n".join(f"  {name:<17}{doc}" for name, doc in listed.items())
        parser = argparse.ArgumentParser(
            description=f"{__doc__}\nbenchmarks:\n{lines}",
            usage="run.py NAME [options]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("name", choices=listed, metavar="NAME")
        parser.parse_args(arguments[:1])
    name, *options = arguments
    first, _ = _common(argparse.ArgumentParser(add_help=False)).parse_known_args(options)
    _limit_threads(first.threads or (1 if name in _ONE_THREAD else 2))
    if first.vectors:
        from _paired import WIDTHS

        if len(first.vectors) > 1:
            return _each_width(name, options, first.vectors)
        os.environ.update(WIDTHS[first.vectors[0]][1])
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"{error}: the benchmarks need: pip install '.[bench]'") from error
    args = _parser(name, listed[name], module.BENCHMARK).parse_args(options)
    return run(module.BENCHMARK, args)


def run(benchmark: Benchmark, args: argparse.Namespace) -> int:
    """Measure, list or draw the rows that the options choose; return 1 if one failed."""
    rows = benchmark.rows(args)
    if args.list:
        print(*rows, sep="\n")
        return 0
    if args.draw:
        benchmark.draw(json.loads(args.draw.read_text("utf-8")))
        return 0
    wanted = chosen(rows, args.only)
    path, head = args.json, benchmark.head(args)
    done: Rows = {}
    if path and len(wanted) < len(rows) and path.exists():
        done = _kept(benchmark, path, head)
    failed, new = [], {}
    for name, figures in _measured(benchmark, wanted, args):
        if figures is None:
            failed.append(name)
            continue
        new[name] = done[name] = figures
        print(shown(name, figures), flush=True)
        if path:  # a run that is interrupted keeps its rows
            ordered = {row: done[row] for row in rows if row in done}
            contents = benchmark.layout.pack(head, ordered)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(contents) + "\n", "utf-8")
    if new and benchmark.summary:
        print(benchmark.summary(new))
    if new and path:
        print(f"written to {path}")
        if benchmark.draw and MEASURED in path.resolve().parents:
            benchmark.draw(contents)
    if failed:
        print("failed: " + "; ".join(failed))
    return 1 if failed else 0


def chosen(rows: Mapping[str, Any], texts: Sequence[str]) -> Rows:
    """Return the rows whose name or group is one of some texts; for a text that is neither, those
    whose names contain it. Without texts, return all rows."""
    found = {} if texts else dict(rows)
    for part in texts:
        own = [n for n, row in rows.items() if part in (n, getattr(row, "group", None))]
        own = own or [name for name in rows if part in name]
        if not own:
            raise SystemExit(f"no row contains {part!r}; --list prints all of them")
        found.update({name: rows[name] for name in own})
    return {name: rows[name] for name in rows if name in found}


def _kept(benchmark: Benchmark, path: Path, head: dict) -> Rows:
    """Return the rows of a file, with their date if it is not that of the head, and let the head
    have the higher peak: other programs on a machine only lower one."""
    if benchmark.layout.unpack is None:
        raise SystemExit("--json stores all rows: leave out --only, or --json")
    contents = json.loads(path.read_text("utf-8"))
    shares_machine(contents, head, path)
    day = contents.get("date")
    rows = benchmark.layout.unpack(contents)
    if day and day != head["date"]:
        rows = {name: {"date": day, **row} for name, row in rows.items()}
    if isinstance(contents.get("peak"), int):
        head["peak"] = max(head["peak"], contents["peak"])
    return rows


def _measured(
    benchmark: Benchmark, rows: Rows, args: argparse.Namespace
) -> Iterator[tuple[str, dict | None]]:
    """Yield the figures of each row, or None if it failed."""
    attempt = partial(_attempt, benchmark.measure, args)
    if benchmark.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            yield from zip(rows, pool.imap(attempt, rows.values()), strict=True)
    else:
        yield from ((name, attempt(row)) for name, row in rows.items())


def _attempt(measure: Any, args: argparse.Namespace, row: Any) -> dict | None:
    try:
        return measure(row, args)
    except Exception:  # the other rows are still measured
        traceback.print_exc()
        return None


def _limit_threads(count: int) -> None:
    """Let TVM, PyTorch and JAX use this many threads, and glibc serve tensors of up to 32 MiB from
    its heap; call it before the import of any of them.

    By default, glibc maps large blocks into fresh pages, which cost more time than the measured
    functions, and returns the end of the heap to the system, in some processes at each call.
    """
    os.environ.update(dict.fromkeys(_THREADS, str(count)))
    os.environ["JAX_PLATFORMS"] = "cpu"
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # other C libraries have no such options
        for option, value in ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            if not libc.mallopt(option, value):
                raise RuntimeError(f"mallopt({option}, {value}) failed: large tensors are mapped")


def _each_width(name: str, options: Sequence[str], widths: Sequence[str]) -> int:
    """Measure each width of vectors in a process of its own: PyTorch reads its limits once."""
    rest = list(options)
    start = rest.index("--vectors")
    rest[start : start + 1 + len(widths)] = []
    commands = [[sys.executable, __file__, name, *rest, "--vectors", width] for width in widths]
    return max(subprocess.run(command).returncode for command in commands)


def _common(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that are read before the benchmark is imported."""
    parser.add_argument(
        "--threads", type=int, help="of each contestant (default: 2, or 1 for some benchmarks)"
    )
    parser.add_argument(
        "--vectors",
        nargs="+",
        choices=("host", "avx2"),
        help="the widths of vectors: of this machine (default), and AVX2, to which PyTorch is held",
    )
    return parser


def _parser(name: str, description: str, benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = _common(argparse.ArgumentParser(prog=f"run.py {name}", description=description))
    default = MEASURED / benchmark.json
    if benchmark.json and not default.suffix:
        default /= file_of_machine(*facts("processor", "target").values())
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="groups, or parts of names of rows"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument(
        "--repeats",
        type=int,
        default=benchmark.repeats,
        help=f"samples of each contestant (default: {benchmark.repeats})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=benchmark.seconds,
        help=f"stop a row after this time (default: {benchmark.seconds:.0f})",
    )
    of_file = {"nargs": "?", "type": Path, "const": default, "metavar": "FILE"}
    if benchmark.json:
        parser.add_argument("--json", **of_file, help=f"store the figures (default: {default})")
    if benchmark.draw:
        parser.add_argument("--draw", **of_file, help="draw a file, and measure nothing")
    if benchmark.jobs > 1:
        parser.add_argument("--jobs", type=int, default=benchmark.jobs, help="processes")
    for option, how in benchmark.options.items():
        parser.add_argument(option, **how)
    parser.set_defaults(json=None, draw=None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
