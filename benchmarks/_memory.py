"""The peak memory of a training step, measured in a separate process for each contestant.

The peak resident memory of a process never falls, so the process does nothing else. The resident
memory before the step (libraries, parameters, inputs) is subtracted: the result is the memory that
the step adds. PyTorch and JAX compile and load code at their first step. They therefore run one
unmeasured step, drop its results, and return freed memory to the system. TVM has compiled in
another process; its first step counts, because it keeps the memory of a step for the next one. Each
step starts from the parameters of the previous one, as in training (JAX's always from the same
parameters). New parameters count if a step returns them beside the old ones, as in TVM's pipeline
and JAX. relax_grad's step updates them in place, as that of a trainer. PyTorch updates them in
place too, but keeps gradients beside them.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

_STEPS = 3


def peak(name: str, column: str, executable=None, arrays=()) -> int | None:
    """Return the peak memory that a step adds, in bytes, or None if the system does not report it.

    Parameters
    ----------
    name : str
        The step.
    column : str
        The contestant.
    executable : tvm.relax.VMExecutable, optional
        The program that TVM has compiled, for the columns of TVM.
    arrays : Sequence[np.ndarray]
        The arguments of the program.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        if executable is not None:
            executable.export_library(f"{folder}/step.so")
            np.savez(f"{folder}/arrays.npz", *arrays)
        command = [sys.executable, __file__, name, column, folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the step {name!r} of {column} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def growth(run: Callable[[], object], forget: Callable[[], None] | None) -> int:
    """Return the peak memory that calls add, in bytes; with ``forget``, one unmeasured call runs
    first."""
    if forget is not None:
        run()
        forget()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak to the current resident memory.
    before = _status("VmRSS")
    for _ in range(_STEPS):
        run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _of_tvm(folder: str) -> int:
    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.runtime.load_module(f"{folder}/step.so"), tvm.cpu())
    with np.load(f"{folder}/arrays.npz") as arrays:
        tensors = [tvm.runtime.tensor(arrays[name]) for name in arrays.files]

    def run() -> None:
        _loss, *updated = machine["step"](*tensors)
        tensors[-len(updated) :] = updated

    return growth(run, None)


def _of_others(name: str, column: str) -> int:
    import _steps
    import torch
    from _models import STEPS

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    (step,) = (step for step in STEPS if step.name == name)
    network, inputs = _steps.initial(step)
    if column == "jax":
        return growth(_steps.in_jax(network, inputs), gc.collect)
    run = _steps.in_torch(network, inputs, column == "torch.compile")
    return growth(run, lambda: network.zero_grad(set_to_none=True))


def main() -> None:
    name, column, folder = sys.argv[1:]
    ours = column in ("relax_grad", "TVM")
    print(json.dumps(_of_tvm(folder) if ours else _of_others(name, column)))


if __name__ == "__main__":
    main()
