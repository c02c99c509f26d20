"""The contestants: a row or a training step, compiled by every installed framework."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import _steps
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
    arrays : Sequence[np.ndarray]
        The arguments of the program of a step.
    """

    run: Callable[[], object]
    results: list[np.ndarray]
    compiling: float
    first: float = 0.0
    executable: relax.VMExecutable | None = None
    kernels: tuple[int, int] = (0, 0)
    arrays: Sequence[np.ndarray] = ()


def contestants(
    entry: Row | Step, columns: Sequence[str], target: tvm.target.Target | None = None
) -> dict[str, Contestant]:
    """Return the contestants of a row or a step, by column, without those that cannot run it.

    relax_grad compiles for the target, by default this machine.
    """
    target = target or relax_grad.target.host()
    if isinstance(entry, Step):
        return _of_columns(columns, lambda column: _of_step(entry, column, target))
    arrays = entry.arrays()
    columns = [column for column in columns if column != "jax" or entry.jax is not None]
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
    if column in ("relax_grad", "TVM"):
        return _by_tvm(
            row.module(arrays), "main", arrays, target if column == "relax_grad" else None
        )
    if column == "jax":
        import jax

        function = jax.jit(row.in_jax(jax))
        inputs = [jax.numpy.array(array) for array in arrays]
        return _by_first_call(lambda: jax.block_until_ready(function(*inputs)))
    function = _steps.compiled(row.torch) if column == "torch.compile" else row.torch
    # Copies, because some rows update their inputs, in PyTorch's memory: NumPy asks for huge pages.
    tensors = [torch.from_numpy(array).clone() for array in arrays]

    def run():
        with torch.no_grad():
            return function(*tensors)

    return _by_first_call(run)


def _of_step(step: Step, column: str, target: tvm.target.Target) -> Contestant:
    network, inputs = _steps.initial(step)
    before = _steps.parameters(network)
    if column in ("relax_grad", "TVM"):
        module, arrays = _steps.in_relax(network, inputs)
        is_ours = column == "relax_grad"
        module = _steps.in_place(module) if is_ours else module
        contestant = _by_tvm(module, "step", arrays, target if is_ours else None)
        contestant.arrays = arrays
    elif column == "jax":
        contestant = _by_first_call(_steps.in_jax(network, inputs))
    else:
        contestant = _by_first_call(_steps.in_torch(network, inputs, column == "torch.compile"))
    contestant.results = _steps.compared(contestant.results, before)
    return contestant


def _by_first_call(run: Callable) -> Contestant:
    start = time.perf_counter()
    results = run()
    compiling = time.perf_counter() - start
    return Contestant(run, flat(results), compiling)


def _by_tvm(
    module: tvm.IRModule,
    name: str,
    arrays: Sequence[np.ndarray],
    target: tvm.target.Target | None,
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
    tensors = [tvm.runtime.tensor(array) for array in arrays]
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
        return [value.detach().numpy().copy()]
    if hasattr(value, "numpy"):
        return [value.numpy().copy()]
    if hasattr(value, "__array__"):
        return [np.array(value)]
    return [leaf for item in value for leaf in flat(item)]
