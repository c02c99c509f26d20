"""Gradients of reductions and scans."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..registry import register_gradient
from ._util import broadcast_like, cast_like, dtype_of, shape_arg, widen


@register_gradient("relax.sum", corrects="symbolic shapes end at order 1")
def sum(orig_var, orig_call, output_grad, ctx):
    """Gradient of sum.

    Forward form: ``y = sum(x, axis, keepdims)``.

    Backward form: ``[broadcast_to(y_grad, x.shape)]``, with the summed axes put back.
    """
    (x,) = orig_call.args
    return [broadcast_like(restore_axes(orig_call, output_grad), x)]


@register_gradient(
    "relax.mean",
    corrects="refuses a symbolic extent, and rounds the count in half precision",
)
def mean(orig_var, orig_call, output_grad, ctx):
    """Gradient of mean.

    Forward form: ``y = mean(x, axis, keepdims)``.

    Backward form: ``[mean_backward_x(y_grad, x.shape, axis, keepdims)]``: ``y_grad / N`` at each of the
    ``N`` elements of a mean.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    return [backward.mean_backward_x(output_grad, shape_arg(x), attrs.axis, attrs.keepdims)]


@register_gradient(
    "relax.variance",
    corrects="refuses a symbolic extent, cancels for a mean far from 0, and loses 2 / N**2 to underflow "
    "in half precision",
)
def variance(orig_var, orig_call, output_grad, ctx):
    """Gradient of variance.

    Forward form: ``y = variance(x, axis, keepdims)``, the mean of the squared deviations.

    Backward form: ``[2 * (x - mean(x, axis)) * mean_backward_x(y_grad, x.shape, axis, keepdims)]``, in
    float32 at least.
    """
    (x,) = orig_call.args
    attrs = orig_call.attrs
    wide = ctx.normalize(widen(x))
    deviation = wide - relax.op.mean(wide, attrs.axis, keepdims=True)
    share = backward.mean_backward_x(widen(output_grad), shape_arg(x), attrs.axis, attrs.keepdims)
    two = relax.const(2, dtype_of(wide))
    return [cast_like(ctx.normalize(two * deviation * share), x)]


def restore_axes(reduction: relax.Call, reduced: relax.Expr) -> relax.Expr:
    """Give a reduction's result back the axes that ``keepdims=False`` removed, with extent 1."""
    axis, keepdims = reduction.attrs.axis, reduction.attrs.keepdims
    if keepdims or axis is None or len(axis) == 0:
        return reduced
    ndim = reduction.args[0].ty.ndim
    if ndim < 0:
        raise GradientError(f"the rank of {reduction.args[0]} must be known")
    return relax.op.expand_dims(reduced, sorted(int(a) % ndim for a in axis))
