"""Gradients of the operators that move elements about."""

from __future__ import annotations

from ..registry import register_gradient
from ._util import broadcast_like, no_grad, unbroadcast


@register_gradient("relax.broadcast_to", corrects="symbolic shapes end at order 1")
def broadcast_to(orig_var, orig_call, output_grad, ctx):
    """Gradient of broadcast_to.

    Forward form: ``y = broadcast_to(x, shape)``.

    Backward form: ``[collapse_sum_to(y_grad, x.shape), no_grad]``.
    """
    x, shape = orig_call.args
    return [unbroadcast(ctx, output_grad, x), no_grad(shape)]


@register_gradient("relax.collapse_sum_to")
def collapse_sum_to(orig_var, orig_call, output_grad, ctx):
    """Gradient of collapse_sum_to.

    Forward form: ``y = collapse_sum_to(x, shape)``.

    Backward form: ``[broadcast_to(y_grad, x.shape), no_grad]``.
    """
    x, shape = orig_call.args
    return [broadcast_like(output_grad, x), no_grad(shape)]


@register_gradient("relax.collapse_sum_like")
def collapse_sum_like(orig_var, orig_call, output_grad, ctx):
    """Gradient of collapse_sum_like.

    Forward form: ``y = collapse_sum_like(x, like)``.

    Backward form: ``[broadcast_to(y_grad, x.shape), no_grad]``.
    """
    x, like = orig_call.args
    return [broadcast_like(output_grad, x), no_grad(like)]
