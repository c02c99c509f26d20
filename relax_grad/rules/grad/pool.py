"""Gradients of the backward operators of pooling."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ...ir.module import short_name
from ...op.pool import adaptive_attrs, pool_attrs
from ...op.rank import rank_of
from ...registry import register_gradient
from .._util import cast_like, no_grad, widen


@register_gradient("relax.grad.max_pool1d_backward")
@register_gradient("relax.grad.max_pool2d_backward")
@register_gradient("relax.grad.max_pool3d_backward")
def max_pool_backward(orig_var, orig_call, output_grad, ctx):
    """Gradient of max_pool1d_backward, max_pool2d_backward and max_pool3d_backward.

    Forward form: ``dx = max_pool_backward(dy, x)``.

    Backward form: ``[max_pool_jvp(dx_grad, x), no_grad]``: which elements are the largest does not
    change with ``x``, except where two become equal.
    """
    dy, data = orig_call.args
    jvp = getattr(backward, f"max_pool{rank_of(orig_call)}d_jvp")
    tangent = jvp(output_grad, data, **pool_attrs(orig_call))
    return [cast_like(ctx, tangent, dy), no_grad(data)]


@register_gradient("relax.grad.max_pool1d_jvp")
@register_gradient("relax.grad.max_pool2d_jvp")
@register_gradient("relax.grad.max_pool3d_jvp")
def max_pool_jvp(orig_var, orig_call, output_grad, ctx):
    """Gradient of max_pool1d_jvp, max_pool2d_jvp and max_pool3d_jvp.

    Forward form: ``y = max_pool_jvp(v, x)``.

    Backward form: ``[max_pool_backward(y_grad, x), no_grad]``.
    """
    tangent, data = orig_call.args
    builder = getattr(backward, f"max_pool{rank_of(orig_call)}d_backward")
    partial = builder(output_grad, data, **pool_attrs(orig_call))
    return [cast_like(ctx, partial, tangent), no_grad(data)]


@register_gradient("relax.grad.avg_pool1d_backward")
@register_gradient("relax.grad.avg_pool2d_backward")
@register_gradient("relax.grad.avg_pool3d_backward")
def avg_pool_backward(orig_var, orig_call, output_grad, ctx):
    """Gradient of avg_pool1d_backward, avg_pool2d_backward and avg_pool3d_backward.

    Forward form: ``dx = avg_pool_backward(dy, x)``, which depends on the shape of ``x`` alone.

    Backward form: ``[avg_pool(dx_grad), no_grad]``.
    """
    return _pooled(ctx, orig_call, output_grad, pool_attrs(orig_call))


@register_gradient("relax.grad.adaptive_avg_pool1d_backward")
@register_gradient("relax.grad.adaptive_avg_pool2d_backward")
@register_gradient("relax.grad.adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(orig_var, orig_call, output_grad, ctx):
    """Gradient of adaptive_avg_pool{1,2,3}d_backward.

    Forward form: ``dx = adaptive_avg_pool_backward(dy, x)``, which depends on the shape of ``x`` alone.

    Backward form: ``[adaptive_avg_pool(dx_grad), no_grad]``.
    """
    return _pooled(ctx, orig_call, output_grad, adaptive_attrs(orig_call))


def _pooled(ctx, call: relax.Call, output_grad: relax.Expr, attrs: dict) -> list:
    """Return the partials of the backward operator of a linear pooling: the pooling of the gradient."""
    dy, data = call.args
    pool = getattr(relax.op.nn, short_name(call).removesuffix("_backward"))
    # TVM accumulates in the dtype of the data.
    return [cast_like(ctx, pool(widen(output_grad), **attrs), dy), no_grad(data)]
