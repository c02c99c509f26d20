"""Gradients of products with weights of 8 and 4 bits.

The numbers have no gradient. Scales and floating-point zero points have one; a training step that
does not ask for it does not compute it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import grad as backward

from ...op.quantized import ZERO_POINTS, Groups
from ...registry import register_gradient
from .._util import cast_like, dtype_of, is_float, no_grad, shape_of, wide_dtype


@register_gradient("relax.grad.quantized_matmul")
def quantized_matmul(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of quantized_matmul.

    Forward form: ``y = x @ W^T`` with ``W = (q - zero_point) * scale``.

    Backward form: ``[quantized_matmul_backward_data(y_grad, x.shape, q, scale, zero_point),
    no_grad, sum(W_grad * (q - zero_point)), sum(-W_grad * scale)]`` with ``W_grad = y_grad^T @ x``
    and sums over groups. Zero points that are integers have no gradient.
    """
    data, weight, scale, *zero_point = orig_call.args
    data_grad = backward.quantized_matmul_backward_data(
        output_grad, shape_of(data), weight, scale, *zero_point
    )
    return [
        data_grad,
        *_weight_partials(ctx, output_grad, data, weight, scale, zero_point=zero_point),
    ]


@register_gradient("relax.grad.quantized_matmul_backward_data")
def quantized_matmul_backward_data(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of quantized_matmul_backward_data.

    Forward form: ``x_grad = y_grad @ W`` with ``W = (q - zero_point) * scale``.

    Backward form: ``[quantized_matmul(x_grad_grad, q, scale, zero_point), no_grad, no_grad,
    sum(W_grad * (q - zero_point)), sum(-W_grad * scale)]`` with ``W_grad = y_grad^T @ x_grad_grad``
    and sums over groups.
    """
    before, data_shape, weight, scale, *zero_point = orig_call.args
    return [
        backward.quantized_matmul(output_grad, weight, scale, *zero_point),
        no_grad(data_shape),
        *_weight_partials(ctx, before, output_grad, weight, scale, zero_point=zero_point),
    ]


def _weight_partials(
    ctx: relax.BlockBuilder,
    rows: relax.Expr,
    columns: relax.Expr,
    weight: relax.Expr,
    scale: relax.Expr,
    zero_point: Sequence[relax.Expr],
) -> list[relax.Expr]:
    """Return the partials of the weight, its scales and its zero points, whose gradient is
    ``rows^T @ columns``."""
    groups, wide = Groups.of(weight), wide_dtype(rows)
    outputs, count, size = groups
    inputs = int(shape_of(columns)[-1])
    *outer, _ = shape_of(rows)

    def flat(factor: relax.Expr, extent: int | tirx.PrimExpr) -> relax.Expr:
        return op.reshape(_cast(ctx, factor, wide), [math.prod(outer), extent])

    product = ctx.normalize(op.matmul(op.permute_dims(flat(rows, outputs)), flat(columns, inputs)))
    if count * size > inputs:
        product = op.nn.pad(product, [0, 0, 0, count * size - inputs])
    product = ctx.normalize(op.reshape(product, [outputs, count, size]))
    if zero_point:
        offset = op.expand_dims(_cast(ctx, zero_point[0], wide), 2)
    else:
        offset = relax.const(ZERO_POINTS[dtype_of(weight)], wide)
    levels = op.subtract(_numbers(ctx, weight, groups, wide), offset)
    scale_grad = ctx.normalize(op.sum(op.multiply(product, levels), [2]))
    partials = [no_grad(weight), cast_like(ctx, scale_grad, scale)]
    for point in zero_point:
        if is_float(point):
            total = op.multiply(op.sum(product, [2]), _cast(ctx, scale, wide))
            partials.append(cast_like(ctx, ctx.normalize(op.negative(total)), point))
        else:
            partials.append(no_grad(point))
    return partials


def _numbers(ctx: relax.BlockBuilder, weight: relax.Expr, groups: Groups, dtype: str) -> relax.Expr:
    """Return the numbers of a weight, ``(outputs, groups, size)``."""
    if dtype_of(weight) == "uint8":
        low = op.bitwise_and(weight, relax.const(15, "uint8"))
        high = op.right_shift(weight, relax.const(4, "uint8"))
        weight = ctx.normalize(op.reshape(op.stack([low, high], 3), list(groups)))
    return ctx.normalize(op.astype(weight, dtype))


def _cast(ctx: relax.BlockBuilder, value: relax.Expr, dtype: str) -> relax.Expr:
    return value if dtype_of(value) == dtype else ctx.normalize(op.astype(value, dtype))
