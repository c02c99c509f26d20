"""Gradients of pooling, for every number of spatial axes."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.relax.op import grad as backward

from ...op.pool import adaptive_attrs, pool_attrs
from ...op.rank import RANKS
from ...registry import register_gradient

_SPLIT = "accepts a layout that splits a spatial axis, and then fails without naming the binding"


@register_gradient("relax.nn.max_pool1d")
@register_gradient("relax.nn.max_pool2d", corrects=_SPLIT)
@register_gradient("relax.nn.max_pool3d")
def max_pool(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of max_pool1d, max_pool2d and max_pool3d.

    Forward form: ``y[o] = max over t of x[o * stride + t * dilation - padding]``.

    Backward form: ``[max_pool_backward(y_grad, x)]``: each window's gradient goes to the first of
    its largest elements.
    """
    (data,) = orig_call.args
    return [_builder(orig_call)(output_grad, data, **pool_attrs(orig_call))]


@register_gradient("relax.nn.avg_pool1d")
@register_gradient("relax.nn.avg_pool2d", corrects=_SPLIT)
@register_gradient("relax.nn.avg_pool3d")
def avg_pool(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of avg_pool1d, avg_pool2d and avg_pool3d.

    Forward form: ``y[o] = sum over t of x[o * stride + t * dilation - padding] / count[o]``.

    Backward form: ``[avg_pool_backward(y_grad, x)]``; only the shape of ``x`` is used.
    """
    (data,) = orig_call.args
    return [_builder(orig_call)(output_grad, data, **pool_attrs(orig_call))]


@register_gradient("relax.nn.adaptive_avg_pool1d")
@register_gradient("relax.nn.adaptive_avg_pool2d")
@register_gradient("relax.nn.adaptive_avg_pool3d")
def adaptive_avg_pool(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of adaptive_avg_pool1d, adaptive_avg_pool2d and adaptive_avg_pool3d.

    Forward form: ``y[o] = mean of x[floor(o * H / O) : ceil((o + 1) * H / O)]``, for ``O`` windows
    over ``H`` elements.

    Backward form: ``[adaptive_avg_pool_backward(y_grad, x)]``; only the shape of ``x`` is used.
    """
    (data,) = orig_call.args
    return [_builder(orig_call)(output_grad, data, **adaptive_attrs(orig_call))]


_BUILDERS = {
    f"relax.nn.{kind}{rank}d": getattr(backward, f"{kind}{rank}d_backward")
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool")
    for rank in RANKS
}


def _builder(call: relax.Call) -> Callable[..., relax.Expr]:
    """Return the builder of the backward operator of a pooling."""
    return _BUILDERS[call.op.name]
