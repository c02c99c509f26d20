"""Steps and kernels in bfloat16 beside float32, by relax_grad and PyTorch.

Steps have mixed precision, by ``precision="bf16"`` and ``torch.autocast``; all inputs of products,
convolutions, attention and a recurrent layer are bfloat16. This is the benchmark for a processor
with tiles (AMX).
"""

from __future__ import annotations

from argparse import Namespace

import frameworks
from _benchmark import Benchmark, Layout, facts
from _contestants import contestants, difference
from _models import Step
from _timing import measure
from rows import ROWS, Row

#: The rows: products of all forms, convolutions and their gradients, volumes, attention, a
#: recurrent layer.
KERNELS = (
    *("NN 1024 x 1024 x 1024", "NT 1024 x 3072 x 768", "TN 1024 x 768 x 3072"),
    *(f"{kind} 8x64x56² -> 64, 3x3" for kind in ("forward", "data gradient", "weight gradient")),
    *("forward 8x256x14² -> 1024, 1x1", "data gradient 8x256x56² -> 512, 1x1, stride 2"),
    *("forward 4x16x16x28x28 -> 32, 3x3x3", "weight gradient 4x16x16x28x28 -> 32, 3x3x3"),
    *("attention 2x512x12x64", "attention and gradients 2x512x12x64"),
    *("attention, causal and gradients 1x2048x4x128", "LSTM and gradients 32x32x128 -> 256"),
)

#: The columns by their names in the file.
COLUMNS = {
    "relax_grad": "relax_grad",
    "PyTorch": "torch",
    "relax_grad, bfloat16": "relax_grad, bfloat16",
    "PyTorch, bfloat16": "torch, bfloat16",
    "torch.compile, bfloat16": "torch.compile, bfloat16",
}

#: The largest difference of results in bfloat16, relative to the largest element of each.
_TOLERANCE = 0.06


def rows(args: Namespace) -> dict[str, Row | Step]:
    """Return the steps and the kernels."""
    by_name = {row.name: row for row in ROWS}
    return {**frameworks.rows(args), **{name: by_name[name] for name in KERNELS}}


def measured(entry: Row | Step, args: Namespace) -> dict:
    """Return the least times of a step or a kernel in both precisions; None for a column that
    cannot run it."""
    by_column = contestants(entry, list(COLUMNS.values()), remat=None)
    pair = [by_column.get(f"{library}, bfloat16") for library in ("relax_grad", "torch")]
    if isinstance(entry, Row) and all(pair) and not entry.is_random:
        error = difference(*(own.results for own in pair))
        if not error < _TOLERANCE:
            raise ValueError(f"{entry.name}: results differ by {error:.1e} of the largest element")
    runs = {column: own.run for column, own in by_column.items()}
    samples = measure(runs, args.repeats, args.seconds, threads=facts("threads")["threads"])
    kind, digits = ("step", 2) if isinstance(entry, Step) else ("kernel", 3)
    least = {
        name: round(min(samples[column]) * 1e3, digits) if column in samples else None
        for name, column in COLUMNS.items()
    }
    return {kind: entry.name, "ms": least}


def head(args: Namespace) -> dict:
    about = facts("date", "processor", "target", "threads", "tvm", "torch", "load")
    unit = "least milliseconds of a training step or a call; null if it cannot run"
    return {**about, "unit": unit}


BENCHMARK = Benchmark(
    rows=rows,
    measure=measured,
    json="half.json",
    head=head,
    layout=Layout(
        lambda head, rows: {**head, "rows": [*rows.values()]},
        lambda contents: {row.get("step") or row["kernel"]: row for row in contents["rows"]},
    ),
    seconds=15.0,
)
