"""Gradients of the weights of attention."""

from __future__ import annotations

from tvm.relax import op

from ...registry import register_gradient
from .._util import cast_like, no_grad, widen


@register_gradient("relax.grad.attention_weights")
def attention_weights(orig_var, orig_call, output_grad, ctx):
    """Gradient of attention_weights.

    Forward form: ``p = attention_weights(s)``: a softmax of ``s`` over the keys that a query attends to, and 0 for
    the others.

    Backward form: ``[(p_grad - sum(p_grad * p)) * p]``, which is 0 wherever ``p`` is 0, whatever the mask.
    """
    scores, *seqstarts = orig_call.args
    weights, grad = ctx.normalize(widen(orig_var)), ctx.normalize(widen(output_grad))
    total = op.sum(op.multiply(grad, weights), [3], keepdims=True)
    partial = op.multiply(op.subtract(grad, total), weights)
    return [cast_like(ctx, partial, scores), *map(no_grad, seqstarts)]
