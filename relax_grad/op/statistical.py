"""The backward operators of reductions."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import Op

from ._infer import infer_data, unused
from ._layout import follow_shape, moved_axes
from .declare import Shape, as_shape, declare_op


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
    return relax.Call(
        Op.get("relax.grad.mean_backward_x"),
        [output_grad, as_shape(x_shape)],
        relax.op.mean(unused(), axis, keepdims).attrs,
    )


def _infer_mean_backward_x(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    return infer_data(call, ctx, "relax.mean", "x_shape")


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
    """Return the axes of a mean in the order of the layout; None if ``keepdims`` is False."""
    attrs = call.attrs
    return {"axis": moved_axes(attrs.axis, layout)} if attrs.keepdims else None


follow_shape("relax.grad.mean_backward_x", attrs=_moved_axes)
