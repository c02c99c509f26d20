"""The common parts of the models of the zoo: their form, their operands, and imports of packages of
models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch_packages import torchvision

with contextlib.suppress(ModuleNotFoundError):
    torchvision()


@dataclass
class Sample:
    """A model with its operands.

    Attributes
    ----------
    module : nn.Module
        The model.
    args : tuple
        Its arguments.
    loss : Callable, optional
        The loss; without it, the model returns the loss.
    targets : tuple
        The further arguments of the loss.
    options : dict
        Further arguments of :func:`torch_models.check`.
    """

    module: nn.Module
    args: tuple
    loss: Callable | None = None
    targets: tuple = ()
    options: dict = field(default_factory=dict)


def sample(module: nn.Module, *args, loss=None, targets=(), **options) -> Sample:
    """Return a model in float64, without dropout, and its operands."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    if isinstance(loss, nn.Module):
        loss = loss.double()
    return Sample(module.double(), args, loss, targets, options)


def normal(*shape) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def unit(*shape) -> torch.Tensor:
    """Return numbers between 0 and 1."""
    return torch.rand(*shape, dtype=torch.float64)


def index(high: int, *shape) -> torch.Tensor:
    return torch.randint(0, high, shape)


def classifier(
    module: nn.Module, size: int = 32, classes: int = 4, batch: int = 3, channels: int = 3
) -> Sample:
    """Return a model that classifies images."""
    return sample(
        module,
        normal(batch, channels, size, size),
        loss=nn.functional.cross_entropy,
        targets=(index(classes, batch),),
    )


class Lossy(nn.Module):
    """A model that returns the value of a function of its submodules and its inputs as the loss.

    Parameters
    ----------
    function : Callable
        A function of this module and the inputs.
    **modules : nn.Module or torch.Tensor
        The submodules, parameters and buffers by name.
    """

    def __init__(self, function: Callable, **modules):
        super().__init__()
        self._function = function
        for name, member in modules.items():
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args):
        return self._function(self, *args)
