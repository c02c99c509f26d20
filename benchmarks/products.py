"""Measure matrix products against PyTorch and the peak of the processor, for each width of vectors.

``python benchmarks/products.py`` measures large products, interleaved, and small ones in blocks
with a pause between the contestants, then products of random sizes. It writes
``docs/_measured/products/PROCESSOR.json``: a file for each machine. PyTorch is held to AVX2 for the
columns of AVX2. The peak is that of multiply-adds in registers, by a loop in C (``cc`` compiles
it).

``--candidates`` measures the ways to compute each small product in one thread, and lists the
products for which the chosen one is more than 10 % slower than another.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time

from _cores import peak
from _widths import (
    WIDTHS,
    against_torch,
    digits,
    median_ratio,
    parser,
    prepare,
    target_of,
    write,
)

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
    (16, 64),
    (64, 64),
    (256, 64),
    (64, 256),
    (10, 1024),
    (16, 768),
    (768, 16),
    (256, 784),
    (1024, 256),
    (1024, 1024),
)
SMALL = [(rows, *layer) for rows in _ROWS for layer in _LAYERS]


def _drawn(number: int) -> list[tuple[int, int, int]]:
    """Return random sizes, the same ones in each run: those that nobody chose."""
    generator, sizes = random.Random(36), []
    while len(sizes) < number:
        size = tuple(round(math.exp(generator.uniform(math.log(4), math.log(5000)))) for _ in "mnk")
        if 2e5 < math.prod(size) < 4e8:
            sizes.append(size)
    return sizes


DRAWN = _drawn(40)

GROUPS = {"large": LARGE, "small": SMALL, "drawn": DRAWN}

#: Whether the first and the second factor are transposed.
_FORMS = ("NN", "NT", "TN", "TT")


def main() -> None:
    args = _parser().parse_args()
    if args.part is not None:
        print(json.dumps(_measured(args.part, args)))
        return
    if args.candidates:
        for width in args.vectors:
            _candidates(width)
        return
    about = {
        "threads": 2,
        "units": {
            "peak": "GFLOP/s of 1 and 2 threads",
            "gflops": "GFLOP/s of relax_grad, by the least time",
            "median": "time of relax_grad / time of PyTorch, the median of paired samples",
            "least": "least time of relax_grad / least time of PyTorch",
        },
    }
    write(__file__, args, about, _summary)


def _measured(width: str, args: argparse.Namespace) -> dict:
    """Return the peak and the rows of a width; in a process whose environment holds PyTorch to this
    width."""
    from _timing import measure
    from rows.products import product

    target = prepare(width, 2)
    peaks = [peak(WIDTHS[width][0], number) for number in (1, 2)]
    rows = []
    members = [(group, sizes) for group, several in GROUPS.items() for sizes in several]
    for group, sizes in members:
        for form in _FORMS:
            row = product(*sizes, form[0] == "T", form[1] == "T")
            calls = against_torch(row, target, 1e-4)
            times = measure(calls, args.repeats, 20, threads=2, binds=True)
            least = min(times["relax_grad"])
            rows.append(
                {
                    "group": group,
                    "form": form,
                    "sizes": list(sizes),
                    "us": round(least * 1e6, 2),
                    "gflops": round(2 * math.prod(sizes) / least / 1e9, 1),
                    "median": median_ratio(times["relax_grad"], times["torch"]),
                    "least": digits(least / min(times["torch"])),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    peaks = [
        max(before, peak(WIDTHS[width][0], n)) for n, before in zip((1, 2), peaks, strict=True)
    ]
    return {"target": target_of(width), "peak": [round(value) for value in peaks], "rows": rows}


def _candidates(width: str) -> None:
    """Print the small products of which a candidate that was not chosen takes less than 90 % of the
    time."""
    os.environ["TVM_NUM_THREADS"] = "1"
    import numpy as np
    import tvm

    from relax_grad.cpu.codegen import lower
    from relax_grad.cpu.kernel.matmul.matmul import WAYS, Matmul, matmul
    from relax_grad.cpu.target import CPU

    target = tvm.target.Target({"kind": "llvm", "mcpu": target_of(width), "num-cores": 1})
    target, count = lower.optimizing(target), 0
    for sizes in SMALL:
        for form in _FORMS:
            product = Matmul(*sizes, form[0] == "T", form[1] == "T")
            cpu = CPU.of(target)
            ways = [None, *(way for way in WAYS if product.allows(way))]
            made = {str(way): matmul(product, cpu, way=way) for way in ways}
            library = lower.library(made, target)
            functions = {name: library[name] for name in made}
            tensors = [tvm.runtime.tensor(np.ones(s, "float32")) for s in product.shapes()]
            calls = max(1, int(2e7 / math.prod(sizes)))
            least = dict.fromkeys(made, math.inf)
            for _ in range(15):
                for name, function in functions.items():
                    start = time.thread_time()
                    for _ in range(calls):
                        function(*tensors)
                    least[name] = min(least[name], (time.thread_time() - start) / calls)
            chosen, best = least.pop("None"), min(least.values())
            count += 1
            if chosen > 1.1 * best:
                times = ", ".join(f"{name} {value * 1e6:.2f}" for name, value in least.items())
                print(f"{width} {form} {sizes}: {chosen * 1e6:.2f} us; {times}")
    print(f"{width}: {count} products")


def _summary(width: str, part: dict) -> str:
    lines = [f"{width} ({part['target']}): peak {part['peak'][0]} and {part['peak'][1]} GFLOP/s"]
    for group in GROUPS:
        for form in _FORMS:
            rows = [row for row in part["rows"] if row["form"] == form and row["group"] == group]
            mean = math.exp(sum(math.log(row["median"]) for row in rows) / len(rows))
            worst = max(rows, key=lambda row: row["median"])
            share = min(row["gflops"] for row in rows) / part["peak"][1]
            lines.append(
                f"  {group} {form}: {mean:.2f} of PyTorch's time (mean of medians), most "
                f"{worst['median']:.2f} at {worst['sizes']}"
                + (f", least share of peak {share:.2f}" if group == "large" else "")
            )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    arguments = parser(__doc__, "products", 7)
    arguments.add_argument(
        "--candidates", action="store_true", help="compare the ways to compute small products"
    )
    return arguments


if __name__ == "__main__":
    main()
