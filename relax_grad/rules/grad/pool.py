"""Gradients of the backward operators of pooling."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward
from tvm.relax.op.nn import avg_pool2d

from ...registry import register_gradient
from .._util import cast_like, no_grad, widen
from ..nn.pool import pool2d_attrs


@register_gradient("relax.grad.max_pool2d_backward")
def max_pool2d_backward(orig_var, orig_call, output_grad, ctx):
    """Gradient of max_pool2d_backward.

    Forward form: ``dx = max_pool2d_backward(dy, x)``.

    Backward form: ``[max_pool2d_jvp(dx_grad, x), no_grad]``: which elements are the largest does not
    change with ``x``, except where two become equal.
    """
    dy, data = orig_call.args
    tangent = ctx.normalize(backward.max_pool2d_jvp(output_grad, data, **pool2d_attrs(orig_call)))
    return [cast_like(tangent, dy), no_grad(data)]


@register_gradient("relax.grad.max_pool2d_jvp")
def max_pool2d_jvp(orig_var, orig_call, output_grad, ctx):
    """Gradient of max_pool2d_jvp.

    Forward form: ``y = max_pool2d_jvp(v, x)``.

    Backward form: ``[max_pool2d_backward(y_grad, x), no_grad]``.
    """
    tangent, data = orig_call.args
    partial = ctx.normalize(
        backward.max_pool2d_backward(output_grad, data, **pool2d_attrs(orig_call))
    )
    return [cast_like(partial, tangent), no_grad(data)]


@register_gradient("relax.grad.avg_pool2d_backward")
def avg_pool2d_backward(orig_var, orig_call, output_grad, ctx):
    """Gradient of avg_pool2d_backward.

    Forward form: ``dx = avg_pool2d_backward(dy, x)``, which depends on the shape of ``x`` alone.

    Backward form: ``[avg_pool2d(dx_grad), no_grad]``.
    """
    dy, data = orig_call.args
    attrs = pool2d_attrs(orig_call)
    layout, out_layout = attrs["layout"], attrs["out_layout"]
    # TVM accumulates in the dtype of the data, and compiles a pooling only where it returns the layout
    # of its data.
    pooled = avg_pool2d(widen(output_grad), **{**attrs, "out_layout": layout})
    if out_layout != layout:
        pooled = relax.op.permute_dims(pooled, [layout.index(name) for name in out_layout])
    return [cast_like(ctx.normalize(pooled), dy), no_grad(data)]
