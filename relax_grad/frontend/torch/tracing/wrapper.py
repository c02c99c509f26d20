"""A module and its loss as one module to trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .._problems import Problem
from .._tensors import described
from ..inputs.results import is_loss, loss_of, named_tensors
from .hooks import watching_hooks
from .state import watching_state
from .tracer import Tracer

_SYMBOLIC_STATE = (
    ", and symbolic extents are none; leave this axis out of dynamic_shapes, or return the tensor"
)


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
    """

    names: list[str]
    has_loss: bool
    form: tuple[pytree.TreeSpec, list]


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
    """

    def __init__(self, module: nn.Module, loss: Callable | None, result: Result, tracer: Tracer):
        super().__init__()
        self.module = module
        self.loss = loss
        self.result = result
        self.tracer = tracer

    def forward(self, args: tuple, kwargs: dict, targets: tuple) -> tuple[torch.Tensor, ...]:
        self.tracer.parameters = list(self.parameters())
        with (
            watching_state(self, self._note_state),
            watching_hooks(self, self._note_state),
            self.tracer.watching(),
            _assigned_buffers(self),
        ):
            result = self.module(*args, **kwargs)
            loss = loss_of(result) if self.loss is None else self.loss(result, *targets)
        if self.loss is not None and not is_loss(loss):
            raise ValueError(
                "loss must return a floating-point tensor of one element, but it returns "
                f"{described(loss)}"
            )
        named = dict(named_tensors(result))
        self.result.names, self.result.has_loss = list(named), loss is not None
        leaves, spec = pytree.tree_flatten(result)
        leaves = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.result.form = spec, leaves
        return (*([] if loss is None else [loss.reshape(())]), *named.values())

    def _note_state(self, operator: str, reason: str, line: str) -> None:
        self.tracer.problems.append(Problem(operator, reason, line))


@contextlib.contextmanager
def _assigned_buffers(module: nn.Module) -> Iterator[None]:
    """Write the tensors that a call assigns to buffers into these buffers, as torch.export drops
    assignments."""
    before = [(submodule, dict(submodule._buffers)) for submodule in module.modules()]
    yield
    for submodule, buffers in before:
        for name, old in buffers.items():
            new = submodule._buffers.get(name)
            if new is old or old is None:
                continue
            # The comparison with a symbolic extent would make it a number.
            is_symbolic = new is not None and not all(isinstance(n, int) for n in new.shape)
            if new is None or is_symbolic or new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(
                    f"the buffer {name} of {type(submodule).__name__} gets {described(new)} in "
                    f"the place of {described(old)}; a buffer must keep its shape and dtype"
                    + _SYMBOLIC_STATE
                    * is_symbolic
                )
            with torch.no_grad():
                old.copy_(new)
            submodule._buffers[name] = old
