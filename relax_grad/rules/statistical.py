"""Gradients of reductions."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, tirx
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..registry import register_gradient
from ._util import (
    bounded_product,
    broadcast_like,
    cast_like,
    dtype_of,
    float_only,
    shape_arg,
    wide_dtype,
    widen,
    zero,
)


@register_gradient("relax.sum", corrects="fails at order 2 for symbolic shapes")
@float_only
def sum(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of sum.

    Forward form: ``y = sum(x, axis, keepdims)``.

    Backward form: ``[broadcast_to(y_grad, x.shape)]``, with the summed axes restored.
    """
    (x,) = orig_call.args
    return [broadcast_like(restore_axes(orig_call, output_grad), x)]


@register_gradient(
    "relax.mean",
    corrects="refuses a symbolic extent, and rounds the count in half precision",
)
@float_only
def mean(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of mean.

    Forward form: ``y = mean(x, axis, keepdims)``.

    Backward form: ``[mean_backward_x(y_grad, x.shape, axis, keepdims)]``: ``y_grad / N`` at each of
    the ``N`` elements of a mean.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    return [backward.mean_backward_x(output_grad, shape_arg(x), attrs.axis, attrs.keepdims)]


@register_gradient(
    "relax.variance",
    corrects="refuses a symbolic extent, cancels for a mean far from 0, and loses 2 / N**2 to "
    "underflow in half precision",
)
@float_only
def variance(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of variance.

    Forward form: ``y = variance(x, axis, keepdims)``, the mean of the squared deviations.

    Backward form: ``[2 * (x - mean(x, axis)) * mean_backward_x(y_grad, x.shape, axis, keepdims)]``,
    in float32 at least.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    wide = ctx.normalize(widen(x))
    deviation = wide - relax.op.mean(wide, attrs.axis, keepdims=True)
    share = backward.mean_backward_x(widen(output_grad), shape_arg(x), attrs.axis, attrs.keepdims)
    two = relax.const(2, dtype_of(wide))
    return [cast_like(ctx, two * deviation * share, x)]


@register_gradient("relax.std")
@float_only
def std(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of std.

    Forward form: ``y = std(x, axis, keepdims)``, the root of the mean of the squared deviations.

    Backward form: ``[(x - mean(x, axis)) * mean_backward_x(y_grad / y, x.shape, axis,
    keepdims)]``, in float32 at least, and 0 where ``y`` is 0, as in PyTorch.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    wide = ctx.emit(widen(x))
    # Squared deviations may leave the range of half precision where the deviation itself does not.
    half = dtype_of(x) != dtype_of(wide)
    y = ctx.emit(relax.op.std(wide, attrs.axis, attrs.keepdims)) if half else orig_var
    flat = ctx.emit(relax.op.equal(y, zero(wide)))
    # Do not divide by 0 even in the unused branch: the quotient's own gradient would be NaN there.
    safe = relax.op.where(flat, relax.const(1, dtype_of(wide)), y)
    scaled = relax.op.where(flat, zero(wide), widen(output_grad) / safe)
    share = backward.mean_backward_x(scaled, shape_arg(x), attrs.axis, attrs.keepdims)
    deviation = wide - relax.op.mean(wide, attrs.axis, keepdims=True)
    return [cast_like(ctx, deviation * share, x)]


@register_gradient("relax.max")
@float_only
def max(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of max.

    Forward form: ``y = max(x, axis, keepdims)``.

    Backward form: ``[y_grad / count]`` at each of the ``count`` elements that are equal to their
    maximum, as for ``torch.amax``, and 0 elsewhere.
    """
    (x,) = orig_call.args
    # If all elements are -inf, TVM's maximum is the least finite number.
    candidates = _within(relax.op.maximum, x, tirx.min_value)
    return [_share_among_equals(orig_call, candidates, orig_var, output_grad, ctx)]


@register_gradient("relax.min")
@float_only
def min(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of min.

    Forward form: ``y = min(x, axis, keepdims)``.

    Backward form: ``[y_grad / count]`` at each of the ``count`` elements that are equal to their
    minimum, as for ``torch.amin``, and 0 elsewhere.
    """
    (x,) = orig_call.args
    # If all elements are inf, TVM's minimum is the largest finite number.
    candidates = _within(relax.op.minimum, x, tirx.max_value)
    return [_share_among_equals(orig_call, candidates, orig_var, output_grad, ctx)]


@register_gradient("relax.median")
@float_only
def median(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of median.

    Forward form: ``y, index = median(x, [axis], keepdims)``, or ``y = median(x, axis, keepdims)``
    over several axes.

    Backward form: ``[gather_elements_backward_data(y_grad, x.shape, index, axis)]``: the median
    element gets the gradient. Over several axes, which give no index, all elements that are equal
    to the median share it, as in PyTorch.
    """
    (x,) = orig_call.args
    if isinstance(orig_var.ty, relax.TensorType):
        return [_share_among_equals(orig_call, x, orig_var, output_grad, ctx)]
    grad = relax.TupleGetItem(output_grad, 0)
    if len(orig_call.attrs.axis) == 0:
        return [grad]
    index = ctx.emit(restore_axes(orig_call, relax.TupleGetItem(orig_var, 1)))
    grad = ctx.emit(restore_axes(orig_call, grad))
    axis = int(orig_call.attrs.axis[0])
    return [backward.gather_elements_backward_data(grad, shape_arg(x), index, axis)]


@register_gradient("relax.prod")
@float_only
def prod(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of prod, without a division, so that any number of elements may be 0.

    Forward form: ``y = prod(x, axis, keepdims)``.

    Backward form: ``[y_grad * linear_scan(x, axis) * linear_scan_reverse(x, axis)]``: the products
    of the elements before and after each element. 0 times a product out of range is 0. Several axes
    are reduced one after the other. In float32 at least.
    """
    (x,) = orig_call.args
    axes = _reduced_axes(orig_call)
    factors = [ctx.emit(widen(x))]  # the factors of the product over each axis
    for axis in axes[:-1]:
        factors.append(ctx.emit(relax.op.prod(factors[-1], axis, keepdims=True)))
    partial = restore_axes(orig_call, widen(output_grad))
    for axis, factor in reversed(list(zip(axes, factors, strict=False))):
        before = ctx.emit(backward.linear_scan(factor, axis=axis))
        after = ctx.emit(backward.linear_scan_reverse(factor, axis=axis))
        partial = partial * bounded_product(before, after)
    return [cast_like(ctx, partial, x)]


def _share_among_equals(
    reduction: relax.Call,
    candidates: relax.Expr,
    reduced: relax.Expr,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
) -> relax.Expr:
    """Share the gradient evenly among the elements that are equal to the result of a reduction.

    If the result is NaN, no element is equal to it, and the gradient is NaN, as in PyTorch.
    """
    (x,) = reduction.args
    extremum = ctx.emit(restore_axes(reduction, reduced))
    equal = ctx.emit(relax.op.astype(relax.op.equal(candidates, extremum), wide_dtype(x)))
    count = relax.op.sum(equal, reduction.attrs.axis, keepdims=True)
    grad = restore_axes(reduction, widen(output_grad))
    return cast_like(ctx, equal * grad / count, x)


def _within(
    clip: Callable[[relax.Expr, relax.Expr], relax.Expr],
    x: relax.Expr,
    bound: Callable[[str], tirx.PrimExpr],
) -> relax.Expr:
    """Return a tensor with the finite number at which TVM's extremes begin instead of an
    infinity; in bfloat16, this number is rounded to the infinity."""
    dtype = dtype_of(x)
    return x if dtype == "bfloat16" else clip(x, _const(bound(dtype), x))


def _const(value: tirx.PrimExpr, like: relax.Expr) -> relax.Expr:
    return relax.const(float(value.value), dtype_of(like))


def _reduced_axes(reduction: relax.Call) -> list[int]:
    """Return the non-negative axes of a reduction."""
    (x,) = reduction.args
    if x.ty.ndim < 0:
        raise GradientError(f"the rank of {x} must be known, but its type is {x.ty}")
    axis = reduction.attrs.axis
    return list(range(x.ty.ndim)) if axis is None else [int(a) % x.ty.ndim for a in axis]


def restore_axes(reduction: relax.Call, reduced: relax.Expr) -> relax.Expr:
    """Restore the axes, with extent 1, that ``keepdims=False`` removed from a reduction's
    result."""
    axis, keepdims = reduction.attrs.axis, reduction.attrs.keepdims
    if keepdims or axis is None or len(axis) == 0:
        return reduced
    ndim = reduction.args[0].ty.ndim
    if ndim < 0:
        raise GradientError(f"the rank of {reduction.args[0]} must be known")
    return relax.op.expand_dims(reduced, sorted(int(a) % ndim for a in axis))
