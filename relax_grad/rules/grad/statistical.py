"""Gradients of the backward operators of reductions."""

from __future__ import annotations

from tvm import relax

from ...registry import register_gradient
from .._util import cast_like, no_grad, widen


@register_gradient("relax.grad.mean_backward_x")
def mean_backward_x(orig_var, orig_call, output_grad, ctx):
    """Gradient of mean_backward_x.

    Forward form: ``dx = mean_backward_x(dy, x.shape, axis, keepdims)``.

    Backward form: ``[mean(dx_grad, axis, keepdims), no_grad]``, accumulated in float32 at least.
    """
    dy, x_shape = orig_call.args
    attrs = orig_call.attrs
    mean = relax.op.mean(widen(output_grad), attrs.axis, attrs.keepdims)
    return [cast_like(ctx, mean, dy), no_grad(x_shape)]
