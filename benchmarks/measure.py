"""Measure kernels and whole training steps against PyTorch, in one process, in turn.

``python benchmarks/measure.py`` writes a table, ``results.json``, ``results.md`` and ``results.png`` to
benchmarks/results. ``--only step`` measures the rows whose group or name contains a text, ``--against`` adds
columns.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from pathlib import Path


def main() -> int:
    args = _parser().parse_args()
    # Both read it when they are imported.
    for variable in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[variable] = str(args.threads)
    try:
        import torch
        from rich.console import Console
    except ImportError as error:
        raise SystemExit(
            f"{error}: install what the benchmarks need with: pip install 'relax_grad[bench]'"
        ) from error
    import tvm
    from _models import STEPS
    from _report import Result, table, write
    from _rows import ROWS
    from _timing import raise_mmap_threshold

    import relax_grad

    torch.set_num_threads(args.threads)
    raise_mmap_threshold()
    others = ["torch", *args.against]
    if "jax" in others and importlib.util.find_spec("jax") is None:
        raise SystemExit("jax is not installed")
    entries = [entry for entry in [*ROWS, *STEPS] if _wanted(entry, args.only)]
    if not entries:
        raise SystemExit(f"no row contains {args.only!r}")
    console = Console()
    results: list[Result] = []
    for entry in entries:
        result = _measured(entry, ["relax_grad", *others], args.repeats, args.seconds)
        results.append(result)
        console.print(
            f"{result.name}: {result.median:.2f} (least {result.least:.2f}), "
            f"compiled in {result.compiling['relax_grad']:.1f} s",
            highlight=False,
        )
    about = {
        "processor": platform.processor() or platform.machine(),
        "target": relax_grad.target.host().attrs["mcpu"],
        "threads": args.threads,
        "tvm": tvm.__version__,
        "torch": torch.__version__,
    }
    write(results, others, about, args.out)
    console.print(table(results, others))
    console.print(f"written to {args.out}")
    return 0


def _measured(entry, columns, repeats: int, seconds: float):
    import numpy as np
    from _contestants import contestants
    from _report import Result
    from _timing import measure

    found = contestants(entry, columns)
    ours, reference = (found[column].result.astype("float64") for column in ("relax_grad", "torch"))
    error = float(np.abs(ours - reference).max() / max(1.0, np.abs(reference).max()))
    samples = measure({name: each.run for name, each in found.items()}, repeats, seconds)
    compiling = {name: each.compiling for name, each in found.items()}
    return Result(entry.group, entry.name, samples, compiling, error)


def _wanted(entry, text: str | None) -> bool:
    return text is None or text == entry.group or text in entry.name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", metavar="TEXT", help="the group, or a part of the name, of the rows"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        choices=["torch.compile", "jax", "TVM"],
        help="more columns; TVM is its own pipeline, which takes minutes for some rows",
    )
    parser.add_argument("--threads", type=int, default=2, help="of each (default: 2)")
    parser.add_argument("--repeats", type=int, default=21, help="samples of each (default: 21)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="stop a row after this time (default: 30)"
    )
    parser.add_argument(
        "--quick",
        dest="repeats",
        action="store_const",
        const=3,
        help="3 samples: to see whether all rows run",
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
