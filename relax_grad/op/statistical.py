"""The backward operators of reductions."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from ._declare import (
    Shape,
    as_shape,
    check_shape,
    declare_op,
    forward_type,
    shape_values,
    tensor_type,
)
from ._layout import follow_shape, moved_axes


def mean_backward_x(
    output_grad: relax.Expr,
    x_shape: relax.Expr | Shape,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
) -> relax.Call:
    """Gradient of mean with respect to its argument.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result of ``mean(x, axis, keepdims)``.
    x_shape : relax.Expr or Sequence[int or PrimExpr]
        The shape of ``x``.
    axis, keepdims
        As given to ``relax.op.mean``.

    Returns
    -------
    result : relax.Call
        A tensor of shape ``x_shape`` and the dtype of ``output_grad``.
    """
    unused = relax.Var("unused", relax.TensorType(dtype="float32"))
    return relax.Call(
        Op.get("relax.grad.mean_backward_x"),
        [output_grad, as_shape(x_shape)],
        relax.op.mean(unused, axis, keepdims).attrs,
    )


def _infer_mean_backward_x(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    output_grad = tensor_type(call, 0, "output_grad")
    values = shape_values(call, 1, "x_shape")
    of_shape = {"ndim": call.args[1].ty.ndim} if values is None else {"shape": values}
    x_type = relax.TensorType(**of_shape, dtype=output_grad.dtype, vdevice=output_grad.vdevice)
    x = relax.Var("x", x_type)
    forward = forward_type(call, ctx, relax.Call(Op.get("relax.mean"), [x], call.attrs))
    if forward.ndim != -1:
        check_shape(call, "output_grad", output_grad, forward)
    return x_type


declare_op(
    "mean_backward_x",
    [
        ("output_grad", "Tensor", "The gradient with respect to the result of mean."),
        ("x_shape", "Shape", "The shape of the argument of mean."),
    ],
    _infer_mean_backward_x,
    mean_backward_x,
    "relax.attrs.StatisticalAttrs",
)


def _moved_axes(call: relax.Call, layout: str) -> dict | None:
    """Return the axes of a mean in the order in which they lie; they do where it keeps them."""
    attrs = call.attrs
    return {"axis": moved_axes(attrs.axis, layout)} if attrs.keepdims else None


follow_shape("relax.grad.mean_backward_x", attrs=_moved_axes)
