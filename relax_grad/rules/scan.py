"""Gradients of scans."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ..registry import register_gradient
from ._util import bounded_product, cast_like, float_only, reshape_like, shape_arg, widen


@register_gradient(
    "relax.cumsum",
    corrects=(
        "ignores exclusive, loses accuracy by cancellation, and refuses symbolic shapes and "
        "bfloat16"
    ),
)
@float_only
def cumsum(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of cumsum.

    Forward form: ``y = cumsum(x, axis, dtype, exclusive)``.

    Backward form: ``[cumsum_backward_data(y_grad, x.shape, axis, exclusive)]``: the cumulative sum
    of the gradient from the other end.
    """
    (x,) = orig_call.args
    axis, exclusive = orig_call.attrs.axis, bool(orig_call.attrs.exclusive)
    partial = backward.cumsum_backward_data(
        output_grad, shape_arg(x), None if axis is None else int(axis), exclusive=exclusive
    )
    return [cast_like(ctx, partial, x)]


@register_gradient("relax.cumprod")
@float_only
def cumprod(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of cumprod, without a division, so that an element may be 0.

    Forward form: ``y = cumprod(x, axis, dtype, exclusive)``. Let ``p`` be the product of the
    elements before each: ``y`` is ``p`` if exclusive, and ``p * x`` otherwise.

    Backward form: ``[p * t]`` with ``t = linear_scan_reverse(x, y_grad)`` if exclusive, and
    ``[p * (t + y_grad)]`` with ``t = linear_scan_reverse(x, x * y_grad)`` otherwise. Here ``t`` is
    the gradient of ``p[i + 1]`` through all later elements. 0 times a product out of range is 0. In
    float32 at least.
    """
    (x,) = orig_call.args
    axis = orig_call.attrs.axis
    grad = ctx.emit(widen(output_grad))
    factors = relax.op.flatten(x) if axis is None else x
    factors = ctx.emit(cast_like(ctx, factors, grad))
    axis = 0 if axis is None else int(axis)
    before = ctx.emit(backward.linear_scan(factors, axis=axis))
    if orig_call.attrs.exclusive:
        through = backward.linear_scan_reverse(factors, grad, axis)
    else:
        through = grad + backward.linear_scan_reverse(factors, ctx.emit(factors * grad), axis)
    partial = cast_like(ctx, bounded_product(before, ctx.emit(through)), x)
    return [reshape_like(partial, x) if orig_call.attrs.axis is None else partial]
