"""Gradients of the backward operators of the activations."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad as backward

from ...registry import register_gradient
from .._util import cast_each, cast_like, widen


@register_gradient("relax.grad.log_softmax_backward")
def log_softmax_backward(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of log_softmax_backward.

    Forward form: ``dx = dy - sum(dy) * p`` with ``p = exp(y)``, with the sum over the axis.

    Backward form: with ``h = dx_grad``, ``[h - sum(h * p), -(h * p) * sum(dy)]``.
    """
    dy, y = orig_call.args
    axis = int(orig_call.attrs.axis)
    grad, wide_dy, wide_y = (ctx.emit(widen(tensor)) for tensor in (output_grad, dy, y))

    def total(expr: relax.Expr) -> relax.Expr:
        return op.sum(expr, axis, keepdims=True)

    along = ctx.emit(op.multiply(grad, op.exp(wide_y)))
    partials = [
        op.subtract(grad, total(along)),
        op.negative(op.multiply(along, total(wide_dy))),
    ]
    return cast_each(ctx, partials, orig_call.args)


@register_gradient("relax.grad.softmax_backward")
def softmax_backward(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of softmax_backward.

    Forward form: ``dx = (dy - sum(dy * y)) * y``, with the sum over the axis.

    Backward form: with ``h = dx_grad``, ``[softmax_backward(h, y), h * (dy - sum(dy * y)) - dy *
    sum(h * y)]``.
    """
    dy, y = orig_call.args
    axis = int(orig_call.attrs.axis)
    grad, wide_dy, wide_y = (ctx.emit(widen(tensor)) for tensor in (output_grad, dy, y))

    def total(expr: relax.Expr) -> relax.Expr:
        return op.sum(op.multiply(expr, wide_y), axis, keepdims=True)

    y_grad = op.subtract(
        op.multiply(grad, op.subtract(wide_dy, total(wide_dy))), op.multiply(wide_dy, total(grad))
    )
    return [
        backward.softmax_backward(output_grad, y, axis),
        cast_like(ctx, y_grad, y),
    ]
