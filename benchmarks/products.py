"""Matrix products of all forms beside PyTorch and the peak, for docs/cpu.md.

The sizes are large ones, small ones of layers, and random ones. The peak is that of multiply-adds
in registers, by a loop in C. ``--vectors host avx2`` measures both widths of vectors.
"""

from __future__ import annotations

import math
import random
from argparse import Namespace
from typing import NamedTuple

import _paired
from _benchmark import Benchmark, facts
from _paired import digits, median_ratio
from _timing import measure
from rows.products import product

LARGE = [
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 1536, 384),
    (1024, 384, 1536),
    (1024, 2304, 768),
    (1024, 768, 3072),
    (1000, 1000, 1000),
]

#: Rows of small products, and their columns and depths: layers of perceptrons, cells of recurrent
#: nets, adapters of low rank, heads of attention, classifiers.
_ROWS = (1, 3, 6, 8, 16, 32, 64, 128)
_LAYERS = (
    *((16, 64), (64, 64), (256, 64), (64, 256), (10, 1024)),
    *((16, 768), (768, 16), (256, 784), (1024, 256), (1024, 1024)),
)
SMALL = [(rows, *layer) for rows in _ROWS for layer in _LAYERS]


class Product(NamedTuple):
    """A product: its group, the form (whether each factor is transposed), and the sizes."""

    group: str
    form: str
    sizes: tuple[int, int, int]


def _drawn(number: int) -> list[tuple[int, ...]]:
    """Return random sizes, the same ones in each run: those that nobody chose."""
    generator, sizes = random.Random(36), []
    while len(sizes) < number:
        size = tuple(round(math.exp(generator.uniform(math.log(4), math.log(5000)))) for _ in "mnk")
        if 2e5 < math.prod(size) < 4e8:
            sizes.append(size)
    return sizes


def rows(groups: dict) -> dict[str, Product]:
    """Return the products of groups of sizes, in all forms."""
    return {
        f"{form} {' x '.join(map(str, sizes))}": Product(group, form, sizes)
        for group, several in groups.items()
        for sizes in several
        for form in ("NN", "NT", "TN", "TT")
    }


def measured(row: Product, args: Namespace) -> dict:
    """Return the times of a product beside PyTorch's."""
    call = product(*row.sizes, *(letter == "T" for letter in row.form))
    calls = _paired.against_torch(call, _paired.prepared(args), 1e-4)
    threads = facts("threads")["threads"]
    times = measure(calls, args.repeats, args.seconds, threads=threads, binds=True)
    least = min(times["relax_grad"])
    return {
        "group": row.group,
        "form": row.form,
        "sizes": list(row.sizes),
        "us": round(least * 1e6, 2),
        "gflops": round(2 * math.prod(row.sizes) / least / 1e9, 1),
        "median": median_ratio(times["relax_grad"], times["torch"]),
        "least": digits(least / min(times["torch"])),
    }


UNITS = {
    "peak": "GFLOP/s of 1 and 2 threads",
    "gflops": "GFLOP/s of relax_grad, by the least time",
    "median": "time of relax_grad / time of PyTorch, the median of paired samples",
    "least": "least time of relax_grad / least time of PyTorch",
}

BENCHMARK = Benchmark(
    rows=lambda args: rows({"large": LARGE, "small": SMALL, "drawn": _drawn(40)}),
    measure=measured,
    json="products",
    head=lambda args: _paired.head(args, UNITS, (1, 2)),
    layout=_paired.LAYOUT,
    summary=lambda rows: _paired.summary(
        rows, lambda row: f"{row['group']} {row['form']}", lambda row: row["median"]
    ),
)
