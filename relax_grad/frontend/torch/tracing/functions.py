"""Functions with a custom gradient: their traces, and the sections of a graph that compute
their gradients.

A call of a ``torch.autograd.Function`` becomes its forward function, its backward function for the
cotangents that :func:`relax_grad::cotangent` stands for, and the operator
``relax_grad::with_backward``, which joins both.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.autograd.function import FunctionCtx, _SingleLevelFunction, once_differentiable
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from .._operators import COTANGENT, JOIN
from .._problems import user_line

#: The annotation of the nodes of backward functions: the numbers of their calls, from the outermost
#: one on.
SECTION = "relax_grad.function"

_ONCE = once_differentiable(lambda ctx: None).__code__


class _Context(FunctionCtx):
    """The context of a traced call, which saves tensors and attributes."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.to_save = ()
        self.materialize_grads = True
        # Of PyTorch 2.15 and 2.14: no gradient of an input is accumulated before the call, and
        # cotangents have the dtypes of their outputs.
        self._input_grad_buffers = (None,) * len(needs_input_grad)
        self.output_grad_dtypes: tuple[torch.dtype | None, ...] | None = None

    @property
    def saved_tensors(self) -> tuple:
        return tuple(self.to_save)

    saved_variables = saved_tensors


class FunctionCalls:
    """Traces the calls of functions with a custom gradient.

    Parameters
    ----------
    note : Callable
        ``note(operator, reason, line=None)`` notes a problem.
    """

    def __init__(self, note: Callable[..., None]):
        self._note = note
        self._count = 0
        self._path: tuple[int, ...] = ()

    def call(self, cls: type[torch.autograd.Function], args: tuple, kwargs: dict) -> object:
        """Return the result of ``cls.apply(*args, **kwargs)``."""
        self._count += 1
        number = self._count
        has_setup = cls.setup_context is not _SingleLevelFunction.setup_context
        if has_setup:
            bound = inspect.signature(cls.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        if any(map(_is_float, pytree.tree_leaves(kwargs))):
            self._note(
                f"{cls.__name__}.apply", "a keyword argument is a tensor; give it by position"
            )
        ctx = _Context(tuple(map(_is_float, args)))
        with torch.no_grad():
            if has_setup:
                result = cls.forward(*args, **kwargs)
                cls.setup_context(ctx, args, result)
            else:
                result = cls.forward(ctx, *args, **kwargs)
        if getattr(ctx, "dirty_tensors", None):
            self._note(f"{cls.__name__}.apply", "it writes to its inputs (mark_dirty)")
        outputs = result if isinstance(result, tuple) else (result,)
        constant = {id(tensor) for tensor in getattr(ctx, "non_differentiable", None) or ()}
        differentiable = [_is_float(output) and id(output) not in constant for output in outputs]
        places = [i for i, arg in enumerate(args) if _is_float(arg)]
        if not torch.is_grad_enabled() or not places or not any(differentiable):
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        wanted = [output for output, has in zip(outputs, differentiable, strict=True) if has]
        operands = [*(args[i] for i in places), *pytree.tree_leaves(ctx.to_save)]
        operands = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        versions = [operand._version for operand in operands]
        # The engine calls backward functions outside of the autocast around their forward function.
        with self._section(number), torch.enable_grad(), _without_autocast():
            cotangents = [COTANGENT(output.detach(), number) for output in wanted]
            rest = (cotangent.clone() for cotangent in cotangents)  # a function may write to them
            dtypes = ctx.output_grad_dtypes or [None] * len(outputs)
            filled = [
                _in_dtype(next(rest), dtype) if has else _filler(output, ctx.materialize_grads)
                for output, has, dtype in zip(outputs, differentiable, dtypes, strict=True)
            ]
            try:
                gradients = self._gradients(cls, ctx, filled, args)
            except Exception as error:  # the user's code raises every kind
                self._fail(cls, error)
                gradients = [None] * len(args)
        if any(operand._version != old for operand, old in zip(operands, versions, strict=True)):
            self._note(f"{cls.__name__}.backward", "it writes to a saved tensor or to an input")
        pairs = [(args[i], gradients[i]) for i in places if gradients[i] is not None]
        joined = JOIN(
            wanted,
            [tensor for tensor, _ in pairs],
            [other for _, other in pairs],
            cotangents,
            number,
            _backward(cls).__code__ is _ONCE,
        )
        rest = iter(joined)
        new = [
            next(rest) if has else output.detach() if isinstance(output, torch.Tensor) else output
            for output, has in zip(outputs, differentiable, strict=True)
        ]
        return tuple(new) if isinstance(result, tuple) else new[0]

    def _gradients(self, cls: type, ctx: _Context, cotangents: list, args: tuple) -> list:
        """Return the gradient of each argument, in its shape and dtype, or None."""
        backward = _backward(cls)
        function = backward.__wrapped__ if backward.__code__ is _ONCE else backward
        boxed = [cotangents] if getattr(cls, "boxed_grads_call", False) else cotangents
        with torch.no_grad() if function is not backward else contextlib.nullcontext():
            gradients = function(ctx, *boxed)
        gradients = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
        extra = gradients[len(args) :]
        if len(gradients) < len(args) or any(gradient is not None for gradient in extra):
            raise ValueError(f"it returns {len(gradients)} gradients for {len(args)} arguments")
        return [
            None if gradient is None or not _is_float(argument) else _fitting(gradient, argument)
            for gradient, argument in zip(gradients, args, strict=False)
        ]

    def _fail(self, cls: type, error: Exception) -> None:
        reason = next(iter(str(error).strip().splitlines()), "")
        self._note(
            f"{cls.__name__}.backward",
            f"it cannot be traced: {type(error).__name__}: {reason}",
            user_line(traceback.extract_tb(error.__traceback__)),
        )

    @contextlib.contextmanager
    def _section(self, number: int) -> Iterator[None]:
        before = self._path
        self._path = (*before, number)
        try:
            with fx_traceback.annotate({SECTION: self._path}):
                yield
        finally:
            self._path = before


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    if not torch.is_autocast_enabled("cpu"):
        yield
        return
    with torch.autocast("cpu", enabled=False):
        yield


def _backward(cls: Any) -> Any:
    """Return the backward function that a user has written, maybe below ``once_differentiable``."""
    has_vjp = cls.vjp is not torch.autograd.Function.vjp
    return cls.vjp if has_vjp else cls.backward


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _filler(output: object, materializes: bool) -> torch.Tensor | None:
    """Return the cotangent of an output without a gradient."""
    is_filled = materializes and isinstance(output, torch.Tensor)
    return torch.zeros_like(output) if is_filled else None


def _in_dtype(cotangent: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a cotangent in the dtype that a function has declared for it."""
    return cotangent if dtype is None else cotangent.to(dtype)


def _fitting(gradient: torch.Tensor, argument: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the shape and dtype of its argument, as PyTorch's engine does."""
    if gradient.shape != argument.shape:
        gradient = gradient.sum_to_size(argument.shape)
    return gradient.to(argument.dtype)


def levels(graph: fx.Graph) -> dict[fx.Node, tuple[int, ...]]:
    """Return the numbers of the calls whose backward functions have a node, from the outermost call
    on.

    Nodes without the annotation, such as regions of autocast, belong to the functions of
    their operands.
    """
    known: dict[fx.Node, tuple[int, ...]] = {}
    for node in graph.nodes:
        known[node] = _level(node, known) if node.op == "call_function" else ()
    return known


def _level(node: fx.Node, known: Mapping[fx.Node, tuple[int, ...]]) -> tuple[int, ...]:
    annotated = (node.meta.get("custom") or {}).get(SECTION)
    if annotated:
        return annotated
    level = max((known[operand] for operand in operands_of(node)), key=len, default=())
    return (*level, node.args[1]) if node.target is COTANGENT else level


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a node, without the gradients that it joins with outputs."""
    return [*node.args[0], *node.args[1]] if node.target is JOIN else node.all_input_nodes
