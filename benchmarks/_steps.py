"""Training steps: forward, backward and SGD, in Relax, PyTorch and JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import tvm
from _models import Step
from tvm import relax

from relax_grad.frontend.torch import from_module
from relax_grad.training import SGD, TrainStep, train_step
from relax_grad.training._donation import donating

RATE = 0.1


def initial(step: Step) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return the network and its inputs, with the same values in every call."""
    torch.manual_seed(0)
    return step.network().train(), step.inputs()


def parameters(network: torch.nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in network.parameters()]


def in_relax(
    network: torch.nn.Module, inputs: Sequence[torch.Tensor], **options: object
) -> tuple[TrainStep, list]:
    """Return a training step with SGD, and the arguments of its function ``step``: arrays, and a
    list of arrays for each group. ``options`` are those of ``train_step``."""
    made = train_step(from_module(network, tuple(inputs)), SGD(lr=RATE), **options)
    scalars = [np.array(value, "float64") for value in made.hyperparameters.values()]
    groups = [[tensor.numpy() for tensor in group.values()] for group in made.initial()]
    return made, [*(tensor.numpy() for tensor in inputs), *scalars, np.array(0, "int64"), *groups]


def in_place(made: TrainStep) -> tvm.IRModule:
    """Return the module of a step that writes new parameters and states to the memory of the old
    ones, as that of a trainer does."""
    return relax.transform.DeadCodeElimination(["step"])(donating(made))


def tensors_of(arguments: Sequence) -> list:
    """Return tensors of TVM for arrays and lists of arrays."""
    return [tensors_of(x) if isinstance(x, list) else tvm.runtime.tensor(x) for x in arguments]


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


def compared(
    loss: np.ndarray, after: Sequence[np.ndarray], before: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the loss, and the gradients as one vector, from the parameters before and after a
    step."""
    changes = [(old - new).ravel() for old, new in zip(before, after, strict=True)]
    return [loss, np.concatenate(changes) / RATE]
