"""What competes: a row, or a training step, compiled in every way that is installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import tvm
from _models import Step
from _rows import Row
from tvm import relax
from tvm.relax.frontend import detach_params
from tvm.relax.frontend.torch import from_exported_program

import relax_grad

#: The columns in the order of tables; the first two are always measured.
COLUMNS = ("relax_grad", "torch", "torch.compile", "jax", "TVM")

_RATE = 0.01


@dataclass
class Contestant:
    """A function that is ready to run, what it returned, and how long it took to compile, in seconds."""

    run: Callable[[], object]
    result: np.ndarray
    compiling: float


def contestants(entry: Row | Step, columns: Sequence[str]) -> dict[str, Contestant]:
    """Return the contestants of a row or a step, by column; without those that cannot run it."""
    make = _of_step if isinstance(entry, Step) else _of_row
    found = {}
    for column in columns:
        start = time.perf_counter()
        run = make(entry, column)
        if run is None:
            continue
        result = _array(run())  # where PyTorch and JAX compile
        found[column] = Contestant(run, result, time.perf_counter() - start)
    return found


def _of_row(row: Row, column: str) -> Callable | None:
    arrays = row.arrays()
    if column in ("relax_grad", "TVM"):
        return _machine(row.module(), "main", arrays, column)
    if column == "jax":
        import jax

        if row.jax is None:
            return None
        function = jax.jit(lambda *args: row.jax(jax, *args))
        inputs = [jax.numpy.asarray(array) for array in arrays]
        return lambda: function(*inputs).block_until_ready()
    function = torch.compile(row.torch) if column == "torch.compile" else row.torch
    tensors = [torch.from_numpy(array) for array in arrays]

    def run():
        with torch.no_grad():
            return function(*tensors)

    return run


def _of_step(step: Step, column: str) -> Callable | None:
    torch.manual_seed(0)
    network, inputs = step.network().train(), step.inputs()
    if column in ("relax_grad", "TVM"):
        values = [p.detach().numpy().copy() for p in network.parameters()]
        module = training_step(network, inputs)
        arrays = [tensor.numpy() for tensor in inputs]
        return _machine(module, "step", [*arrays, *values], column)
    if column == "jax":
        return None
    # Each step starts with the same parameters, as those of the others do: it adds up what is not used.
    optimizer = torch.optim.SGD(network.parameters(), lr=_RATE)
    loss_of = torch.compile(network) if column == "torch.compile" else network

    def run():
        loss = loss_of(*inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return run


def _machine(
    module: tvm.IRModule, name: str, arrays: Sequence[np.ndarray], column: str
) -> Callable:
    """Compile by relax_grad for this machine, or as TVM does by default."""
    is_ours = column == "relax_grad"
    executable = tvm.compile(
        module,
        relax_grad.target.host() if is_ours else tvm.target.Target("llvm"),
        relax_pipeline="relax_grad" if is_ours else "default",
    )
    function = relax.VirtualMachine(executable, tvm.cpu())[name]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    return lambda: function(*tensors)


def training_step(network: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tvm.IRModule:
    """Return the module whose ``step`` takes inputs and parameters, and returns loss and new parameters."""
    exported = torch.export.export(network, inputs)
    module = from_exported_program(
        exported, keep_params_as_input=True, unwrap_unit_return_tuple=True
    )
    module, _ = detach_params(module)
    learned = module["main"].params[len(inputs) :]
    module = relax_grad.value_and_grad(module, "main", [param.name for param in learned])
    params = [relax.Var(param.name, param.ty) for param in module["main"].params]
    bb = relax.BlockBuilder(module)
    with bb.function("step", params):
        with bb.dataflow():
            both = bb.emit(relax.Call(module.get_global_var("main_adjoint"), params))
            loss = bb.emit(relax.TupleGetItem(both, 0))
            gradients = bb.emit(relax.TupleGetItem(both, 1))
            rate = relax.const(_RATE, "float32")
            updated = []
            for i, param in enumerate(params[len(inputs) :]):
                gradient = bb.emit(relax.TupleGetItem(gradients, i))
                change = bb.emit(relax.op.multiply(gradient, rate))
                updated.append(bb.emit(relax.op.subtract(param, change)))
            result = bb.emit_output(relax.Tuple([loss, *updated]))
        bb.emit_func_output(result)
    return relax.transform.DeadCodeElimination(["step"])(bb.get())


def _array(value) -> np.ndarray:
    """Return a copy of the first result: of a step the loss."""
    if isinstance(value, (tuple, list)) or type(value).__name__ == "Array":
        value = value[0]
    if isinstance(value, torch.Tensor):
        value = value.detach()
    return np.array(value.numpy() if hasattr(value, "numpy") else value)
