"""Training steps: forward, backward and SGD, in Relax, PyTorch and JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import tvm
from _models import Step
from tvm import relax
from tvm.relax.frontend import detach_params
from tvm.relax.frontend.torch import from_exported_program

import relax_grad

RATE = 0.1


def initial(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return the network and its inputs, with the same values in every call."""
    torch.manual_seed(0)
    return step.network().train(), step.inputs()


def parameters(network: torch.nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in network.parameters()]


def in_relax(network: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> tvm.IRModule:
    """Return the module whose ``step`` takes inputs and parameters, and returns loss and new parameters."""
    exported = torch.export.export(network, tuple(inputs))
    module = from_exported_program(
        exported, keep_params_as_input=True, unwrap_unit_return_tuple=True
    )
    module, _ = detach_params(module)
    learned = module["main"].params[len(inputs) :]
    module = relax_grad.value_and_grad(module, "main", [param.name for param in learned])
    for name in ("main", "main_adjoint"):  # they have no other callers
        module[name] = module[name].without_attr("global_symbol")
    params = [relax.Var(param.name, param.ty) for param in module["main"].params]
    bb = relax.BlockBuilder(module)
    with bb.function("step", params):
        with bb.dataflow():
            both = bb.emit(relax.Call(module.get_global_var("main_adjoint"), params))
            loss = bb.emit(relax.TupleGetItem(both, 0))
            gradients = bb.emit(relax.TupleGetItem(both, 1))
            rate = relax.const(RATE, "float32")
            updated = []
            for i, param in enumerate(params[len(inputs) :]):
                gradient = bb.emit(relax.TupleGetItem(gradients, i))
                change = bb.emit(relax.op.multiply(gradient, rate))
                updated.append(bb.emit(relax.op.subtract(param, change)))
            result = bb.emit_output(relax.Tuple([loss, *updated]))
        bb.emit_func_output(result)
    return relax.transform.DeadCodeElimination(["step"])(bb.get())


def in_torch(
    network: torch.nn.Module, inputs: Sequence[torch.Tensor], is_compiled: bool
) -> Callable[[], list[torch.Tensor]]:
    """Return a function that takes a training step, and returns the loss and the updated parameters."""
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    loss_of = torch.compile(network) if is_compiled else network

    def run():
        loss = loss_of(*inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss, *network.parameters()]

    return run


def in_jax(network: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[[], list]:
    """Return a function that computes the loss and new parameters, always from the same parameters."""
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
    """Return the loss, and the gradients as one vector, from the loss and the parameters after a step."""
    loss, *after = results
    changes = [(old - new).ravel() for old, new in zip(before, after, strict=True)]
    return [loss, np.concatenate(changes) / RATE]
