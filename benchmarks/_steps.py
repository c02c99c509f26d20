"""Training steps: forward, backward and SGD, in Relax, PyTorch and JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import tvm
from _models import Step
from tvm import relax

import relax_grad
from relax_grad.frontend.torch import from_module
from relax_grad.ir.module import DONATED, with_functions
from relax_grad.ir.remat import LIGHT, REMAT

RATE = 0.1


def initial(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return the network and its inputs, with the same values in every call."""
    torch.manual_seed(0)
    return step.network().train(), step.inputs()


def parameters(network: torch.nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in network.parameters()]


def in_relax(
    network: torch.nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """Return a module and the arguments of its function ``step``.

    The arguments are the inputs, the buffers that stay, the parameters, and the running statistics.
    The function returns the loss, the new parameters and the new statistics. Its backward pass
    repeats the calls that ``remat="light"`` of ``train_step`` repeats.
    """
    imported = from_module(network, tuple(inputs))
    learned, frozen, states = imported.params, imported.frozen, imported.states
    module = relax_grad.value_and_grad(imported.module, "loss", list(learned))
    for name in ("loss", "loss_adjoint", "forward"):  # they have no other callers
        module[name] = module[name].without_attr("global_symbol")
    _seed, *params = [relax.Var(param.name, param.ty) for param in module["loss"].params]
    ends = np.cumsum([len(inputs), len(learned), len(frozen)])
    arguments, old, fixed, statistics = (list(part) for part in np.split(params, ends))
    bb = relax.BlockBuilder(module)
    with bb.function("step", [*arguments, *fixed, *old, *statistics]):
        with bb.dataflow():
            adjoint = module.get_global_var("loss_adjoint")
            zero = relax.const(0, "int64")  # the networks draw no random numbers
            both = bb.emit(relax.Call(adjoint, [zero, *params]))
            results = bb.emit(relax.TupleGetItem(both, 0))
            gradients = bb.emit(relax.TupleGetItem(both, 1))
            loss = bb.emit(relax.TupleGetItem(results, 0))
            new_states = bb.emit(relax.TupleGetItem(results, 2))
            rate = relax.const(RATE, "float32")
            updated = []
            for i, param in enumerate(old):
                gradient = bb.emit(relax.TupleGetItem(gradients, i))
                change = bb.emit(relax.op.multiply(gradient, rate))
                updated.append(bb.emit(relax.op.subtract(param, change)))
            updated.extend(bb.emit(relax.TupleGetItem(new_states, i)) for i in range(len(states)))
            result = bb.emit_output(relax.Tuple([loss, *updated]))
        bb.emit_func_output(result)
    values = [*frozen.values(), *learned.values(), *states.values()]
    arrays = [*(tensor.numpy() for tensor in inputs), *(value.numpy() for value in values)]
    module = relax.transform.DeadCodeElimination(["step"])(bb.get())
    return with_functions(module, {"step": module["step"].with_attr(REMAT, LIGHT)}), arrays


def in_place(module: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose function ``step`` writes new parameters and statistics to the memory of
    the old ones, as that of a trainer does."""
    step = module["step"]
    new = len(step.ret_ty.fields) - 1  # the loss comes first
    donated = [[len(step.params) - new + i, 1 + i] for i in range(new)]
    return with_functions(module, {"step": step.with_attr(DONATED, donated)})


def compiled(function: Callable) -> Callable:
    """Return ``torch.compile(function)``, for which PyTorch forgets other compiled functions.

    It stops compiling a function with code that it compiled eight times for others, such as the
    ``forward`` of a class of layers, and runs it as it is.
    """
    torch._dynamo.reset()
    return torch.compile(function)


class UnderAutocast(torch.nn.Module):
    """A network within ``torch.autocast``."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.network(*inputs)


def in_torch(
    network: torch.nn.Module, inputs: Sequence[torch.Tensor], is_compiled: bool
) -> Callable[[], list[torch.Tensor]]:
    """Return a function that takes a training step, and returns the loss and the updated
    parameters."""
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    loss_of = compiled(network) if is_compiled else network

    def run():
        loss = loss_of(*inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss, *network.parameters()]

    return run


def in_jax(network: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[[], list]:
    """Return a function that computes the loss and new parameters, always from the same
    parameters."""
    import _exported
    import jax

    loss_of = _exported.in_jax(torch.export.export(network, tuple(inputs)))
    values = [jax.numpy.array(value) for value in parameters(network)]
    arrays = [jax.numpy.array(tensor.numpy()) for tensor in inputs]

    @jax.jit
    def step(values, arrays):
        loss, gradients = jax.value_and_grad(loss_of)(values, arrays)
        return [loss, *(p - RATE * g for p, g in zip(values, gradients, strict=True))]

    return lambda: jax.block_until_ready(step(values, arrays))


def compared(results: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the loss, and the gradients as one vector, from the loss and the parameters after a
    step."""
    loss, *after = results  # running statistics come last
    changes = [(old - new).ravel() for old, new in zip(before, after, strict=False)]
    return [loss, np.concatenate(changes) / RATE]
