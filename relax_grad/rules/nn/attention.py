"""Gradients of attention."""

from __future__ import annotations

from tvm.relax import op
from tvm.relax.op import grad as backward

from ...op.attention import for_heads, shared_by, take_apart
from ...registry import register_gradient
from .._util import cast_each, cast_like, dtype_of, no_grad, shape_arg, shape_of, unbroadcast


@register_gradient("relax.nn.attention")
def attention(orig_var, orig_call, output_grad, ctx):
    """Gradient of attention.

    Forward form, for each head: ``o = p @ v`` with ``p = softmax(scale * q @ k^T)`` over the keys that the
    causal mask and the window admit for a query.

    Backward form, with ``dp = o_grad @ v^T`` and ``ds = p * (dp - sum(dp * p))``, where the sum is over the keys:
    ``[scale * ds @ k, scale * ds^T @ q, p^T @ o_grad]``. The last two are summed over the query heads that share
    a head of the keys or of the values.

    The weights ``p`` are recomputed from ``q`` and ``k``, in float32 at least. ``sum(dp * p)`` is
    ``sum(o_grad * o)`` over the features, which saves two passes over tensors as large as the weights. In half
    precision the rounding error of ``o`` is too large for that.
    """
    return _attention(orig_var, orig_call, output_grad, ctx)[0]


@register_gradient("relax.nn.attention_bias")
def attention_bias(orig_var, orig_call, output_grad, ctx):
    """Gradient of attention_bias.

    Forward form: that of :func:`attention` with ``p = softmax(scale * q @ k^T + bias)``.

    Backward form: that of :func:`attention`, and ``ds`` for the bias, summed over the axes along which it was
    broadcast.
    """
    partials, scores_grad = _attention(orig_var, orig_call, output_grad, ctx)
    bias = orig_call.args[3]
    return [*partials, cast_like(ctx, unbroadcast(ctx, scores_grad, bias), bias)]


@register_gradient("relax.nn.attention_var_len")
def attention_var_len(orig_var, orig_call, output_grad, ctx):
    """Gradient of attention_var_len.

    Forward and backward form: those of :func:`attention`, where a query attends to the keys of its own sequence.

    The weights of all pairs of queries and keys are computed, even across sequences: time and memory grow with
    the square of the total length.
    """
    partials, _ = _attention(orig_var, orig_call, output_grad, ctx)
    return [*partials, *map(no_grad, orig_call.args[3:])]


def _attention(orig_var, orig_call, output_grad, ctx):
    """Return the partials of queries, keys and values, and the gradient of the scores."""
    query, key, value = orig_call.args[:3]
    emit, heads = ctx.emit, shape_of(query)[2]
    parts = take_apart(ctx, orig_call)
    weights, wide = parts.weights, dtype_of(parts.weights)

    def widened(expr):
        return expr if dtype_of(expr) == wide else emit(op.astype(expr, wide))

    def own_heads(grad, like):
        """Sum over the query heads that share a head of the keys or the values."""
        shared = shared_by(like, heads)
        if shared == 1:
            return grad
        return backward.repeat_backward_data(emit(grad), shape_arg(like), shared, 1)

    grad = widened(output_grad)
    by_position = emit(op.permute_dims(grad, [0, 2, 1, 3]))
    by_feature = emit(op.permute_dims(grad, [0, 2, 3, 1]))
    weights_grad = emit(op.matmul(by_position, for_heads(ctx, parts.value, heads)))
    if dtype_of(orig_var) == wide:
        inner = op.sum(op.multiply(grad, orig_var), [3], keepdims=True)
        inner = op.permute_dims(inner, [0, 2, 1, 3])
    else:
        inner = op.sum(op.multiply(weights_grad, weights), [3], keepdims=True)
    scores_grad = emit(op.multiply(weights, op.subtract(weights_grad, inner)))

    keys = for_heads(ctx, parts.key, heads)
    query_grad = op.matmul(scores_grad, op.permute_dims(keys, [0, 1, 3, 2]))
    gradients = [
        op.permute_dims(op.multiply(query_grad, parts.scale), [0, 2, 1, 3]),
        op.permute_dims(own_heads(op.matmul(parts.query, scores_grad), parts.key), [0, 3, 1, 2]),
        op.permute_dims(own_heads(op.matmul(by_feature, weights), parts.value), [0, 3, 1, 2]),
    ]
    return cast_each(ctx, gradients, (query, key, value)), scores_grad
