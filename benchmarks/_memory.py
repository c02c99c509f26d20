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
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from _benchmark import in_process

if TYPE_CHECKING:
    from tvm import relax

_STEPS = 3


def peak(
    name: str, column: str, executable: relax.VMExecutable | None = None, arrays: Sequence = ()
) -> int | None:
    """Return the peak memory that a step adds, in bytes, or None if the system does not report it.

    Parameters
    ----------
    name : str
        The step.
    column : str
        The contestant.
    executable : tvm.relax.VMExecutable, optional
        The program that TVM has compiled, for the columns of TVM.
    arrays : Sequence
        The arguments of the program: arrays, and lists of arrays.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    if executable is None:
        return in_process("_memory", "of_others", name, column)
    with tempfile.TemporaryDirectory() as folder:
        executable.export_library(f"{folder}/step.so")
        Path(folder, "arrays").write_bytes(pickle.dumps(arrays))
        return in_process("_memory", "of_tvm", folder)


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


def of_tvm(folder: str) -> int:
    """Return the memory that steps of a program add, each from the results of the previous one."""
    import _steps
    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.runtime.load_module(f"{folder}/step.so"), tvm.cpu())
    *single, params, frozen, states, slots = _steps.tensors_of(
        pickle.loads(Path(folder, "arrays").read_bytes())
    )
    groups = [params, frozen, states, slots]
    del params, frozen, states, slots

    def run() -> None:
        _loss, _metrics, _outputs, params, states, slots = machine["step"](*single, *groups)
        groups[:] = [list(params), groups[1], list(states), list(slots)]

    return growth(run, None)


def of_others(name: str, column: str) -> int:
    """Return the memory that steps of PyTorch or JAX add."""
    import _steps
    from _models import STEPS

    (step,) = (step for step in STEPS if step.name == name)
    network, inputs = _steps.initial(step)
    if column == "jax":
        return growth(_steps.in_jax(network, inputs), gc.collect)
    run = _steps.in_torch(network, inputs, column == "torch.compile")
    return growth(run, lambda: network.zero_grad(set_to_none=True))
