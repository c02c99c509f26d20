"""Operators that control differentiation and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax
from tvm.ir import GlobalVar, Op

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
    [("data", "Tensor", "The value to treat as a constant.")],
    _infer_stop_gradient,
    stop_gradient,
)


def differentiable_once(data: relax.Expr, sources: relax.Expr | Sequence) -> relax.Call:
    """Return the data unchanged; a gradient that reaches it is an error.

    Parameters
    ----------
    data : relax.Expr
        A tensor.
    sources : relax.Expr or Sequence[relax.Expr]
        A tuple of tensors that the data depend on, where the program does not show it.

    Returns
    -------
    result : relax.Call
        The same tensor.
    """
    return relax.Call(Op.get("relax.grad.differentiable_once"), [data, _tuple(sources)])


def with_backward(
    outputs: relax.Expr | Sequence,
    inputs: relax.Expr | Sequence,
    residuals: relax.Expr | Sequence,
    backward: relax.Expr,
) -> relax.Call:
    """Return the outputs of a computation, whose gradient is a function of the module.

    The computation of the outputs is not differentiated.

    Parameters
    ----------
    outputs : relax.Expr or Sequence[relax.Expr]
        A tuple of floating-point tensors.
    inputs : relax.Expr or Sequence[relax.Expr]
        A tuple of the floating-point tensors with a gradient.
    residuals : relax.Expr or Sequence[relax.Expr]
        A tuple of further arguments of the function: tensors and shapes.
    backward : relax.Expr
        The function ``(*outputs, *residuals, *output_grads) -> (input_grads...)``, a global
        variable.

    Returns
    -------
    result : relax.Call
        The tuple of the outputs.
    """
    fields = map(_tuple, (outputs, inputs, residuals))
    return relax.Call(Op.get("relax.grad.with_backward"), [*fields, backward])


def _tuple(fields: relax.Expr | Sequence) -> relax.Expr:
    """Return a tuple of expressions, which TVMScript gives as an array."""
    return fields if isinstance(fields, relax.Expr) else relax.Tuple(list(fields))


def _infer_with_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    for argument, name in zip(call.args[:3], ("outputs", "inputs", "residuals"), strict=True):
        if not isinstance(argument.ty, relax.TupleType):
            raise TypeError(
                f"{call.op.name}: {name} must be a tuple, but its type is {argument.ty}"
            )
    if not isinstance(call.args[3], GlobalVar):
        raise TypeError(
            f"{call.op.name}: backward must be a function of the module, but it is {call.args[3]}"
        )
    return call.args[0].ty


declare_op(
    "differentiable_once",
    [
        ("data", "Tensor", "A result of a first derivative."),
        ("sources", "Tuple", "The tensors that it depends on."),
    ],
    _infer_stop_gradient,
    differentiable_once,
    requires_argument_shapes=False,
)
declare_op(
    "with_backward",
    [
        ("outputs", "Tuple", "The results of a computation."),
        ("inputs", "Tuple", "The tensors with a gradient."),
        ("residuals", "Tuple", "Further arguments of the backward function."),
        ("backward", "Function", "The backward function, a global variable."),
    ],
    _infer_with_backward,
    with_backward,
    requires_argument_shapes=False,
)
