"""Kernels and whole training steps beside PyTorch, for docs/cpu.md.

The contestants run in one process, in turn. ``--against`` adds columns. With ``--json``, the charts
of the page are drawn.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from statistics import median

import _charts
import _memory
from _benchmark import Benchmark, Layout, Rows, facts
from _contestants import contestants, difference
from _cores import peak
from _models import STEPS, Step
from _paired import summary
from _timing import measure
from rows import ROWS, Row

_SYMBOLIC = "symbolic batch: "

#: The units of the figures of a row.
UNITS = {
    "ms": "milliseconds of relax_grad, the median of the samples",
    "ratios": "time of relax_grad / time of the column, the median of the ratios of paired samples",
    "least": "least time of relax_grad / least time of PyTorch",
    "error": "largest difference from PyTorch, relative to the largest element",
    "compiling_s": "seconds",
    "kernels": "calls, different kernels",
    "gflops": "GFLOP/s of a direct computation in the least time of relax_grad",
    "peak": "GFLOP/s of multiply-adds in registers, in as many threads",
    "memory_mb": "MB that a step adds to the resident memory at most",
}


def measured(entry: Row | Step, args: Namespace) -> dict:
    """Return the figures of a row or a step."""
    by_column = contestants(entry, ["relax_grad", "torch", *args.against])
    # For a contestant above the time limit of a row, the first call is accurate enough.
    slow = {name: [own.first] for name, own in by_column.items() if own.first > args.seconds}
    quick = {name: own.run for name, own in by_column.items() if name not in slow}
    samples = measure(quick, args.repeats, args.seconds, threads=facts("threads")["threads"])
    found = figures(entry.group, entry.name, samples | slow)
    ours = by_column["relax_grad"]
    if not getattr(entry, "is_random", False):
        found["error"] = float(f"{difference(ours.results, by_column['torch'].results):.0e}")
    found["compiling_s"] = round(ours.compiling, 1)
    found["kernels"] = list(ours.kernels)
    if flops := getattr(entry, "flops", 0):
        found["gflops"] = round(flops / min(samples["relax_grad"]) / 1e9)
    if isinstance(entry, Step):
        used = {
            name: _memory.peak(entry.name, name, own.executable, own.arrays)
            for name, own in by_column.items()
            if name in quick
        }
        found["memory_mb"] = {name: round(size / 1e6) for name, size in used.items() if size}
    return found


def figures(group: str, name: str, samples: dict[str, list[float]]) -> dict:
    """Return the figures of samples in seconds: medians of pairs, or the ratio of the medians to a
    column with another number of samples."""
    ours = samples["relax_grad"]

    def ratio(theirs: list[float]) -> float:
        if len(theirs) != len(ours):
            return median(ours) / median(theirs)
        return median(a / b for a, b in zip(ours, theirs, strict=True))

    return {
        "group": group,
        "name": name.removeprefix(_SYMBOLIC),
        "ms": round(median(ours) * 1e3, 3),
        "least": round(min(ours) / min(samples["torch"]), 4),
        "ratios": {key: round(ratio(own), 4) for key, own in samples.items() if own is not ours},
    }


def head(args: Namespace) -> dict:
    about = facts("date", "processor", "target", "threads", "tvm", "torch")
    if args.json and shutil.which("cc"):
        about["peak"] = round(peak(["-march=native"], about["threads"]))
    return {**about, "units": UNITS}


def _unpacked(contents: dict) -> Rows:
    return {
        (_SYMBOLIC if row["group"] == "symbolic" else "") + row["name"]: row
        for row in contents["rows"]
    }


BENCHMARK = Benchmark(
    rows=lambda args: {entry.name: entry for entry in (*ROWS, *STEPS)},
    measure=measured,
    json="cpu",
    head=head,
    layout=Layout(lambda head, rows: {**head, "rows": [*rows.values()]}, _unpacked),
    draw=_charts.draw_cpu,
    summary=lambda rows: summary(rows, lambda r: r["group"], lambda r: r["ratios"]["torch"]),
    repeats=21,
    seconds=30.0,
    options={
        "--against": {
            "nargs": "+",
            "default": [],
            "choices": ("torch.compile", "jax", "TVM"),
            "help": "more columns; jax for steps; TVM is its own pipeline, which takes minutes",
        }
    },
)
