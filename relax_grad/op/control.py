"""Operators that control differentiation and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.ir import Op

from ._infer import tensor_type
from .declare import declare_op


def stop_gradient(data: relax.Expr) -> relax.Call:
    """Return the data unchanged, and treat it as a constant in differentiation.

    Parameters
    ----------
    data : relax.Expr
        A tensor.

    Returns
    -------
    result : relax.Call
        The same tensor; no gradient flows through it.

    Raises
    ------
    TypeError
        If the data is not an expression.
    """
    _check_expr("data", data)
    return relax.Call(Op.get("relax.grad.stop_gradient"), [data])


def checkpoint(function: Callable[..., relax.Expr], *inputs: relax.Expr) -> relax.Expr:
    """Build a section of a program whose intermediate results are recomputed for the gradient.

    Only its inputs are kept between the forward and the backward pass.

    Parameters
    ----------
    function : Callable
        Takes the inputs and returns an expression: a tensor or a tuple of tensors.
    *inputs : relax.Expr
        Tensors that are variables; other values that the function captures are kept.

    Returns
    -------
    result : relax.Expr
        The result of the function.

    Raises
    ------
    TypeError
        If ``function`` is not callable, or an input or the function's result is not an expression.
    """
    if not callable(function) or isinstance(function, relax.Var):
        raise TypeError(f"function must be callable, but it is {function!r}")
    for i, item in enumerate(inputs):
        _check_expr(f"inputs[{i}]", item)
    result = function(*map(relax.op.grad.start_checkpoint, inputs))
    if isinstance(result, (tuple, list, relax.Tuple)):
        fields = result.fields if isinstance(result, relax.Tuple) else result
        return relax.Tuple([_end_checkpoint(field) for field in fields])
    return _end_checkpoint(result)


def _end_checkpoint(result: relax.Expr) -> relax.Expr:
    _check_expr("the result of function", result)
    return relax.op.grad.end_checkpoint(result)


def _check_expr(name: str, item: relax.Expr) -> None:
    if not isinstance(item, relax.Expr):
        raise TypeError(f"{name} must be a Relax expression, but it is {item!r}")


def _infer_stop_gradient(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    return tensor_type(call, 0, "data")


declare_op(
    "stop_gradient",
    [("data", "Tensor", "What is a constant.")],
    _infer_stop_gradient,
    stop_gradient,
)
