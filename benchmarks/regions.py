"""Start and end of parallel regions in TVM and PyTorch, for docs/cpu.md.

The regions run one after the other, or after a pause, in which the threads fall asleep, or in turn,
as in a process that calls both. PyTorch needs GNU's OpenMP, and the benchmark ``cc``.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

from _benchmark import HERE, Benchmark, Layout, facts

#: Regions of a sample, and the seconds of a pause.
_COUNT, _PAUSE = 1000, 0.02


def measured(name: str, args: Namespace) -> dict:
    """Return the median microseconds of a region; in turn, of one of each."""
    if name == "in_turn":
        of_tvm, of_torch = _tvm(), _openmp()

        def in_turn() -> None:
            for _ in range(_COUNT):
                of_tvm(1)
                of_torch(1)

        return {"us": _microseconds(in_turn, _COUNT, args.repeats)}
    run = _tvm() if name == "tvm" else _openmp()
    return {
        "repeated": _microseconds(lambda: run(_COUNT), _COUNT, args.repeats),
        "after_a_pause": _microseconds(lambda: run(1), 1, args.repeats, _PAUSE),
    }


def _microseconds(run: Callable[[], object], count: int, repeats: int, pause: float = 0.0) -> float:
    """Return the median time of a region."""
    run()
    samples = []
    for _ in range(repeats):
        time.sleep(pause)
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) / count)
    return round(1e6 * median(samples), 1)


@cache
def _tvm() -> Callable[[int], None]:
    """Return a function that runs regions of TVM's thread pool."""
    import numpy as np
    import tvm
    from tvm.script import tirx as T

    @T.prim_func
    def regions(A: T.Buffer((2,), "int32"), count: T.int64):
        T.func_attr({"global_symbol": "regions"})
        for _ in range(count):
            for i in T.parallel(2):
                A[i] = A[i] + 1

    library = tvm.compile(tvm.IRModule({"regions": regions}), target="llvm")
    function, counts = library["regions"], tvm.runtime.tensor(np.zeros(2, "int32"))
    return lambda count: function(counts, count)


@cache
def _openmp() -> Callable[[int], None]:
    """Return a function that runs regions of PyTorch's OpenMP."""
    import torch

    torch.set_num_threads(2)
    torch.ones(10**6).sum()  # starts the threads
    loaded = Path("/proc/self/maps").read_text().split()
    ctypes.CDLL(next(path for path in loaded if "libgomp" in path), ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "regions.so")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(path), str(HERE / "_regions.c")]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
    return lambda count: library.regions(ctypes.c_long(count), ctypes.c_uint(2))


BENCHMARK = Benchmark(
    rows=lambda args: {name: name for name in ("tvm", "torch", "in_turn")},
    measure=measured,
    json="regions.json",
    head=lambda args: {
        "about": facts("recorded", "processor", "threads"),
        "unit": "microseconds of a region, the median; in turn: of one of each",
    },
    layout=Layout(
        lambda head, rows: {**head, **{n: row.get("us", row) for n, row in rows.items()}}
    ),
    repeats=31,
)
