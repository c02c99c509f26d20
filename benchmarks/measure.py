"""Measure kernels and whole training steps against PyTorch, in one process, in turn.

``python benchmarks/measure.py`` writes tables, ``results.json``, ``page.json``, ``results.md`` and
``results.png`` to benchmarks/results. ``--only TEXT`` measures the rows with this text in their
group or name, ``--against`` adds columns, and ``--all`` adds all columns.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import sys
import traceback
from pathlib import Path

import _json_rows

#: The columns that are measured on request.
OPTIONAL = ("torch.compile", "jax", "TVM")

#: The least width of tables: a log has no terminal width.
_WIDTH = 140


def main() -> int:
    args = _parser().parse_args()
    _limit_threads(args.threads)
    try:
        import torch
        from rich.console import Console
    except ImportError as error:
        raise SystemExit(
            f"{error}: install the dependencies of the benchmarks with: pip install '.[bench]'"
        ) from error
    from _cores import peak
    from _models import STEPS
    from _report import reports, updated, write
    from _timing import raise_mmap_threshold
    from rows import ROWS

    torch.set_num_threads(args.threads)
    raise_mmap_threshold()
    others = ["torch", *_asked_for(args)]
    entries = [entry for entry in [*ROWS, *STEPS] if _wanted(entry, args.only)]
    if not entries:
        raise SystemExit(f"no row contains {args.only!r}")
    if args.update and not (args.out / "results.json").exists():
        raise SystemExit(f"--update: there is no results.json in {args.out}")
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    results, failed = [], []
    for entry in entries:
        try:
            result = _measured(entry, ["relax_grad", *others], args)
        except Exception:  # The other rows are still measured.
            traceback.print_exc()
            failed.append(entry.name)
            continue
        results.append(result)
        console.print(_line(result), markup=False, soft_wrap=True)
    about = _json_rows.about(processor(), args.threads)
    if shutil.which("cc"):
        about["peak"] = round(peak(["-march=native"], args.threads))
    if args.update and results:
        names = [(entry.group, entry.name) for entry in [*ROWS, *STEPS]]
        results, about = updated(results, about, args.out / "results.json", names)
        others = list(dict.fromkeys([*others, *_columns(results)]))
    if results:
        write(results, others, about, args.out)
        for report in reports(results, others):
            console.print(report.to_rich())
        console.print(f"written to {args.out}")
    if failed:
        console.print("failed: " + "; ".join(failed), markup=False)
    return 1 if failed else 0


def _columns(results) -> list[str]:
    """Return the columns of all results but relax_grad, and "static" of symbolic rows."""
    columns = dict.fromkeys(column for result in results for column in result.samples)
    return [column for column in columns if column not in ("relax_grad", "static")]


def _limit_threads(count: int) -> None:
    """Let TVM, PyTorch and JAX use this many threads; call it before the import of any of them."""
    # XLA has no option for it: this variable sets the size of its thread pool, by default the
    # number of cores.
    for variable in ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "PJRT_NPROC"):
        os.environ[variable] = str(count)
    os.environ["JAX_PLATFORMS"] = "cpu"


def _asked_for(args: argparse.Namespace) -> list[str]:
    has_jax = importlib.util.find_spec("jax") is not None
    if args.all:
        return [column for column in OPTIONAL if column != "jax" or has_jax]
    if "jax" in args.against and not has_jax:
        raise SystemExit("jax is not installed: pip install '.[bench]', with Python 3.11 or later")
    return args.against


def _measured(entry, columns: list[str], args: argparse.Namespace):
    import _memory
    from _contestants import contestants, difference
    from _models import Step
    from _report import Result
    from _timing import measure

    by_column = contestants(entry, columns)
    # For a contestant above the time limit of a row, the first call is accurate enough.
    slow = {
        name: contestant
        for name, contestant in by_column.items()
        if contestant.first > args.seconds
    }
    quick = {name: contestant.run for name, contestant in by_column.items() if name not in slow}
    samples = measure(quick, args.repeats, args.seconds, threads=args.threads)
    samples.update({name: [contestant.first] for name, contestant in slow.items()})
    memory = {}
    if isinstance(entry, Step):
        for name, contestant in by_column.items():
            if name not in slow:
                memory[name] = _memory.peak(
                    entry.name, name, contestant.executable, contestant.arrays
                )
    reference = None if getattr(entry, "is_random", False) else by_column["torch"].results
    errors = {}
    if reference is not None:
        errors = {name: difference(own.results, reference) for name, own in by_column.items()}
    return Result(
        entry.group,
        entry.name,
        samples,
        {name: contestant.compiling for name, contestant in by_column.items()},
        errors,
        by_column["relax_grad"].kernels,
        {name: value for name, value in memory.items() if value is not None},
        getattr(entry, "flops", 0),
    )


def _line(result) -> str:
    calls, different = result.kernels
    parts = [
        f"{result.name}: {result.median:.2f} (least {result.least:.2f})",
        f"compiled in {result.compiling['relax_grad']:.1f} s, {calls} calls of {different} kernels",
        f"error {max(result.errors.values()):.0e}" if result.errors else "random numbers",
    ]
    if {"relax_grad", "torch"} <= result.memory.keys():
        ours, theirs = (result.memory[column] / 1e6 for column in ("relax_grad", "torch"))
        parts.append(f"memory {ours:.0f} MB, PyTorch's {theirs:.0f} MB")
    return "; ".join(parts)


def processor() -> str:
    """Return the name of the processor, or of its architecture if the system does not report it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _wanted(entry, text: str | None) -> bool:
    return text is None or text == entry.group or text in entry.name


def _parser() -> argparse.ArgumentParser:
    from _timing import add_options

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", metavar="TEXT", help="the group, or a part of the name, of the rows"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        choices=OPTIONAL,
        help="more columns; TVM is its own pipeline, which takes minutes for some rows",
    )
    parser.add_argument("--all", action="store_true", help="all columns: jax where it is installed")
    add_options(parser, "row", repeats=21, seconds=30.0)
    parser.add_argument(
        "--quick",
        dest="repeats",
        action="store_const",
        const=1,
        help="one sample: to see whether all rows run",
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="keep the rows of results.json in the folder that are not measured now",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="the folder of the results (default: benchmarks/results)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
