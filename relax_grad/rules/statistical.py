"""Gradients of reductions and scans."""

from __future__ import annotations

from tvm import relax

from ..registry import register_gradient
from ._util import broadcast_like


@register_gradient(
    "relax.sum", corrects="takes an empty axis list for all axes; symbolic shapes end at order 1"
)
def sum(orig_var, orig_call, output_grad, ctx):
    """Gradient of sum.

    Forward form: ``y = sum(x, axis, keepdims)``.

    Backward form: ``[broadcast_to(y_grad, x.shape)]``, with the summed axes put back.
    """
    (x,) = orig_call.args
    return [broadcast_like(restore_axes(orig_call, output_grad), x)]


def restore_axes(reduction: relax.Call, reduced: relax.Expr) -> relax.Expr:
    """Give a reduction's result back the axes that ``keepdims=False`` removed, with extent 1."""
    axis, keepdims = reduction.attrs.axis, reduction.attrs.keepdims
    if keepdims or axis is None or len(axis) == 0:
        return reduced
    ndim = reduction.args[0].ty.ndim
    return relax.op.expand_dims(reduced, sorted(int(a) % ndim for a in axis))
