"""A module and its loss as one module to trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .._problems import Problem
from .._tensors import described
from ..inputs.results import is_loss, loss_of, named_tensors
from .buffers import assigned_buffers
from .hooks import watching_hooks
from .state import watching_state
from .tracer import Tracer

#: It stands for a tensor in the form of a result.
TENSOR = object()


class Result:
    """The result of a module, as its trace found it.

    torch.export restores the attributes of modules, and therefore they cannot hold it.

    Attributes
    ----------
    names : list[str]
        The names of the tensors.
    has_loss : bool
        Whether there is a loss.
    form : tuple
        As for :class:`Program`.
    reads : set[tuple[int, str]]
        The :func:`~.state.identity` of submodules with the names of the attributes that the call
        has read.
    """

    names: list[str]
    has_loss: bool
    form: tuple[pytree.TreeSpec, list]
    reads: set[tuple[int, str]]


class Wrapper(nn.Module):
    """A module and a loss as one module that returns a flat tuple of tensors: the loss, if there is
    one, and the outputs.

    Parameters
    ----------
    module : nn.Module
        The module.
    loss : Callable, optional
        The loss, of the module's result and the targets.
    result : Result
        It takes the form of the result.
    tracer : Tracer
        The context of the trace.
    autocast : torch.dtype, optional
        The dtype of ``torch.autocast`` around the module and the loss. Results in this dtype become
        float32.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable | None,
        result: Result,
        tracer: Tracer,
        autocast: torch.dtype | None = None,
    ):
        super().__init__()
        self.autocast = autocast
        self.module = module
        self.loss = loss
        self.result = result
        self.tracer = tracer

    def forward(self, args: tuple, kwargs: dict, targets: tuple) -> tuple[torch.Tensor, ...]:
        self.tracer.parameters = list(self.parameters())
        with (
            watching_state(self, self._note_state) as self.result.reads,
            watching_hooks(self, self._note_state),
            self.tracer.watching(),
            assigned_buffers(self),
        ):
            with self._autocast():
                result = self.module(*args, **kwargs)
                loss = None if self.loss is None else self.loss(result, *targets)
            if self.autocast is not None:
                result, loss = pytree.tree_map_only(torch.Tensor, self._widened, (result, loss))
            loss = loss_of(result) if self.loss is None else loss
        if self.loss is not None and not is_loss(loss):
            raise ValueError(
                "loss must return a floating-point tensor of one element, but it returns "
                f"{described(loss)}; {_remedy(loss)}"
            )
        named = named_tensors(result)
        self.result.names, self.result.has_loss = list(named), loss is not None
        leaves, spec = pytree.tree_flatten(result)
        leaves = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.result.form = spec, leaves
        return (*([] if loss is None else [loss.reshape(())]), *named.values())

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", self.autocast)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == self.autocast else tensor

    def _note_state(self, operator: str, reason: str, line: str) -> None:
        self.tracer.problems.append(Problem(operator, reason, line))


def _remedy(loss: object) -> str:
    """Return the change of a loss that does not return one number as a tensor."""
    if isinstance(loss, (tuple, list)):
        return "return the loss alone: loss=lambda *tensors: loss(*tensors)[0]"
    if isinstance(loss, torch.Tensor):
        return "take the mean: loss=lambda *tensors: loss(*tensors).mean()"
    return "compute it with torch, and leave out float(), .item() and .numpy()"
