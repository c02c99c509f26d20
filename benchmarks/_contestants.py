"""The contestants: a row or a training step, compiled by every installed framework."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import _steps
import ml_dtypes
import numpy as np
import torch
import tvm
from _models import Step
from rows import Row
from tvm import relax

import relax_grad


@dataclass
class Contestant:
    """A compiled row or training step.

    Attributes
    ----------
    run : Callable
        A call.
    results : list[np.ndarray]
        The results of the first call; for a step, the loss and the gradients.
    compiling : float
        The compile time in seconds; for PyTorch and JAX, which compile in the first call, with this
        call.
    first : float
        The time of the first call in seconds; 0 if this call compiled.
    executable : tvm.relax.VMExecutable, optional
        The program that TVM compiled. That of a step in relax_grad updates its arguments in place,
        as a trainer and PyTorch do.
    kernels : tuple[int, int]
        The number of kernel calls, and the number of different kernels.
    arrays : Sequence
        The arguments of the program of a step: arrays, and lists of arrays.
    """

    run: Callable[[], object]
    results: list[np.ndarray]
    compiling: float
    first: float = 0.0
    executable: relax.VMExecutable | None = None
    kernels: tuple[int, int] = (0, 0)
    arrays: Sequence = ()


def contestants(
    entry: Row | Step,
    columns: Sequence[str],
    target: tvm.target.Target | None = None,
    remat: str | None = "light",
) -> dict[str, Contestant]:
    """Return the contestants of a row or a step, by column, without those that cannot run it.

    Columns are ``relax_grad``, ``torch``, ``torch.compile``, ``jax`` for steps, ``TVM``, and the
    first three with the suffix ``, bfloat16``. relax_grad compiles for the target, by default this
    machine, and repeats calls of a step's forward pass as ``remat`` of ``train_step`` says.
    """
    target = target or relax_grad.target.host()
    if isinstance(entry, Step):
        return _of_columns(columns, lambda column: _of_step(entry, column, target, remat))
    arrays = entry.arrays()
    columns = [column for column in columns if column != "jax"]
    by_column = _of_columns(columns, lambda column: _of_row(entry, arrays, column, target))
    if entry.symbolic:
        by_column["static"] = _of_row(replace(entry, symbolic=()), arrays, "relax_grad", target)
    return by_column


def _of_columns(columns: Sequence[str], make: Callable[[str], Contestant]) -> dict[str, Contestant]:
    made = {column: _attempt(make, column) for column in columns}
    return {column: contestant for column, contestant in made.items() if contestant is not None}


def _attempt(make: Callable[[str], Contestant], column: str) -> Contestant | None:
    try:
        return make(column)
    except Exception:  # The benchmark continues after any failure of another framework.
        if column in ("relax_grad", "torch"):
            raise
        traceback.print_exc()
        return None


def difference(results: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Return the largest difference of results, relative to the largest element of each."""
    worst = 0.0
    for ours, theirs in zip(results, wanted, strict=True):
        if ours.shape != theirs.shape:
            return float("inf")
        scale = max(np.abs(theirs).max(initial=0.0), 1e-3)
        error = np.abs(ours - theirs).max(initial=0.0) / scale
        worst = max(worst, float(np.nan_to_num(error, nan=np.inf)))
    return worst


def _of_row(
    row: Row, arrays: Sequence[np.ndarray], column: str, target: tvm.target.Target
) -> Contestant:
    library, _, dtype = column.partition(", ")
    if dtype:
        arrays = [x.astype(ml_dtypes.bfloat16) if x.dtype == np.float32 else x for x in arrays]
    if library in ("relax_grad", "TVM"):
        return _by_tvm(row.module(arrays), "main", arrays, target if column != "TVM" else None)
    function = _steps.compiled(row.torch) if library == "torch.compile" else row.torch
    # Copies, because some rows update their inputs, in PyTorch's memory: NumPy asks for huge pages.
    tensors = [_tensor(array) for array in arrays]

    def run():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bool(dtype)):
            return function(*tensors)

    return _by_first_call(run)


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype("float32")).bfloat16()
    return torch.from_numpy(array).clone()


def _of_step(step: Step, column: str, target: tvm.target.Target, remat: str | None) -> Contestant:
    library, _, dtype = column.partition(", ")
    network, inputs = _steps.initial(step)
    before = _steps.parameters(network)
    if library in ("relax_grad", "TVM"):
        precision = "bf16" if dtype else None
        made, arrays = _steps.in_relax(network, inputs, remat=remat, precision=precision)
        is_ours = library == "relax_grad"
        module = _steps.in_place(made) if is_ours else made.module
        contestant = _by_tvm(module, "step", arrays, target if is_ours else None)
        contestant.arrays = arrays
        skipped = 1 + len(made.metrics) + len(made.outputs)
        by_name = dict(zip(made.params, contestant.results[skipped:], strict=False))
        after = [by_name[name] for name, _ in network.named_parameters() if name in by_name]
    else:
        network = _steps.UnderAutocast(network) if dtype else network
        if library == "jax":
            run = _steps.in_jax(network, inputs)
        else:
            run = _steps.in_torch(network, inputs, library == "torch.compile")
        contestant = _by_first_call(run)
        after = contestant.results[1:]
    contestant.results = _steps.compared(contestant.results[0], after, before)
    return contestant


def _by_first_call(run: Callable) -> Contestant:
    start = time.perf_counter()
    results = run()
    compiling = time.perf_counter() - start
    return Contestant(run, flat(results), compiling)


def _by_tvm(
    module: tvm.IRModule, name: str, arrays: Sequence, target: tvm.target.Target | None
) -> Contestant:
    """Compile with relax_grad for a target; with TVM's default pipeline if it is None."""
    is_ours = target is not None
    target = target or tvm.target.Target("llvm")
    counter = _CountKernels()
    if is_ours:  # a separate, untimed run: with an instrument, one thread compiles the functions
        with tvm.transform.PassContext(instruments=[counter]), target:
            relax_grad.pipeline()(module)
    start = time.perf_counter()
    executable = tvm.compile(module, target, relax_pipeline="relax_grad" if is_ours else "default")
    compiled = time.perf_counter()
    function = relax.VirtualMachine(executable, tvm.cpu())[name]
    tensors = _steps.tensors_of(arrays)
    called = time.perf_counter()
    results = function(*tensors)
    first = time.perf_counter() - called
    return Contestant(
        lambda: function(*tensors),
        flat(results),
        compiled - start,
        first,
        executable,
        counter.found,
    )


@tvm.instrument.pass_instrument
class _CountKernels:
    """Count the kernel calls, and the different kernels, after dispatch."""

    def __init__(self):
        self.found = (0, 0)

    def run_after_pass(self, module, info):
        if info.name != "relax_grad.DispatchKernels":
            return
        called = []
        for _, function in module.functions_items():
            if isinstance(function, relax.Function):
                relax.analysis.post_order_visit(function, lambda e: called.extend(_kernel(e)))
        self.found = (len(called), len(set(called)))


def _kernel(expr: relax.Expr) -> list[str]:
    if not isinstance(expr, relax.Call) or expr.op != tvm.ir.Op.get("relax.call_tir"):
        return []
    name = expr.args[0].name_hint
    return [name] if "_kernel" in name else []


def flat(value) -> list[np.ndarray]:
    """Return copies of the tensors in a result of any form."""
    if isinstance(value, torch.Tensor):
        is_half = value.dtype == torch.bfloat16
        return [value.detach().float().numpy() if is_half else value.detach().numpy().copy()]
    if hasattr(value, "numpy"):
        array = value.numpy()
        return [array.astype("float32") if array.dtype == ml_dtypes.bfloat16 else array.copy()]
    if hasattr(value, "__array__"):
        return [np.array(value)]
    return [leaf for item in value for leaf in flat(item)]
