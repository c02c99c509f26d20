"""Run the programs that ``tests/cpu/test_determinism.py`` compiles, and print hashes of the
results."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import tvm
from tvm import relax


def leaves(value) -> list:
    if hasattr(value, "numpy"):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


def digest(tensors) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.numpy().tobytes())
    return state.hexdigest()[:16]


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    kernels = tvm.runtime.load_module(str(folder / "kernels.so"))
    for _ in range(2):
        rng = np.random.default_rng(0)
        digests = {}
        for name, inputs, outputs in jobs["kernels"]:
            arrays = [
                rng.normal(size=shape).astype(dtype)
                if dtype == "float32"
                else rng.integers(-4, 4, shape).astype(dtype)
                for shape, dtype in inputs
            ]
            results = [
                tvm.runtime.tensor(np.full(shape, np.nan, dtype)) for shape, dtype in outputs
            ]
            kernels[name](*map(tvm.runtime.tensor, arrays), *results)
            digests[name] = digest(results)
        for name in jobs["steps"]:
            module = tvm.runtime.load_module(str(folder / f"{name}.so"))
            machine = relax.VirtualMachine(module, tvm.cpu())
            arrays = np.load(folder / f"{name}.npz")
            arrays = [tvm.runtime.tensor(arrays[key]) for key in arrays.files]
            digests[name] = digest(leaves(machine["main_adjoint"](*arrays)))
        print(json.dumps(digests))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
