"""Measure the start and end of a parallel region without work, of TVM's thread pool and of
PyTorch's OpenMP.

``python benchmarks/regions.py`` measures regions one behind the other, a region behind a pause, in
which the threads fall asleep, and regions of both in turn, as in a process that calls both. It
needs PyTorch with GNU's OpenMP, and ``cc``. It writes the page's figures to
``docs/_measured/regions.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
THREADS = 2

#: Regions of a sample, samples, and the seconds of a pause.
_COUNT, _SAMPLES, _PAUSE = 1000, 31, 0.02


def main() -> None:
    args = _parser().parse_args()
    os.environ.update(dict.fromkeys(("TVM_NUM_THREADS", "OMP_NUM_THREADS"), str(THREADS)))
    from measure import processor

    of_tvm, of_torch = _tvm(), _openmp()
    figures = {}
    for name, run in (("tvm", of_tvm), ("torch", of_torch)):
        figures[name] = {
            "repeated": _microseconds(lambda run=run: run(_COUNT), _COUNT),
            "after_a_pause": _microseconds(lambda run=run: run(1), 1, _PAUSE),
        }

    def in_turn() -> None:
        for _ in range(_COUNT):
            of_tvm(1)
            of_torch(1)

    figures["in_turn"] = _microseconds(in_turn, _COUNT)
    about = {"recorded": date.today().isoformat(), "processor": processor(), "threads": THREADS}
    unit = "microseconds of a region, the median; in turn: of one of each"
    text = json.dumps({"about": about, "unit": unit, **figures}, indent=1)
    args.out.write_text(text + "\n")
    print(text)


def _microseconds(run: Callable[[], object], count: int, pause: float = 0.0) -> float:
    """Return the median time of a region."""
    run()
    samples = []
    for _ in range(_SAMPLES):
        time.sleep(pause)
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) / count)
    return round(1e6 * median(samples), 1)


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


def _openmp() -> Callable[[int], None]:
    """Return a function that runs regions of PyTorch's OpenMP."""
    import torch

    torch.set_num_threads(THREADS)
    torch.ones(10**6).sum()  # starts the threads
    loaded = Path("/proc/self/maps").read_text().split()
    ctypes.CDLL(next(path for path in loaded if "libgomp" in path), ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "regions.so")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(path), str(HERE / "_regions.c")]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
    return lambda count: library.regions(ctypes.c_long(count), ctypes.c_uint(THREADS))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs/_measured/regions.json")
    return parser


if __name__ == "__main__":
    main()
