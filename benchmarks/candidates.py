"""The ways to compute small matrix products, in one thread by its processor time.

A row is marked ``slow`` if the chosen way takes more than 1.1 times the time of another one.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace

import numpy as np
import tvm
from _benchmark import Benchmark
from _paired import target_of, width_of
from products import SMALL, Product, rows

from relax_grad.cpu.codegen import lower
from relax_grad.cpu.kernel.matmul.matmul import WAYS, Matmul, matmul
from relax_grad.cpu.target import CPU


def measured(row: Product, args: Namespace) -> dict:
    """Return the least microseconds of each way, and the chosen one."""
    mcpu = target_of(width_of(args))
    target = lower.optimizing(tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 1}))
    product = Matmul(*row.sizes, *(letter == "T" for letter in row.form))
    ways = [None, *(way for way in WAYS if product.allows(way))]
    made = {str(way): matmul(product, CPU.of(target), way=way) for way in ways}
    library = lower.library(made, target)
    functions = {name: library[name] for name in made}
    tensors = [tvm.runtime.tensor(np.ones(shape, "float32")) for shape in product.shapes()]
    calls = max(1, int(2e7 / math.prod(row.sizes)))
    least = dict.fromkeys(made, math.inf)
    for _ in range(args.repeats):
        for name, function in functions.items():
            start = time.thread_time()
            for _ in range(calls):
                function(*tensors)
            least[name] = min(least[name], (time.thread_time() - start) / calls)
    chosen = least.pop("None")
    slow = chosen > 1.1 * min(least.values())
    return {
        "us": round(chosen * 1e6, 2),
        "ways": {name: round(value * 1e6, 2) for name, value in least.items()},
        **({"slow": True} if slow else {}),
    }


BENCHMARK = Benchmark(
    rows=lambda args: rows({"small": SMALL}),
    measure=measured,
    summary=lambda rows: f"slow: {'; '.join(n for n, r in rows.items() if 'slow' in r) or 'none'}",
    repeats=15,
)
