"""Gradients of the weights of attention."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from ...op.attention import for_heads, forward_of, inner_products, own_heads, take_apart
from ...registry import register_gradient
from .._util import cast_each, cast_like, dtype_of, no_grad, shape_of, unbroadcast, widen


@register_gradient("relax.grad.attention_weights")
def attention_weights(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of attention_weights.

    Forward form: ``p = attention_weights(s)``: a softmax of ``s`` over the keys that a query
    attends to, and 0 for the others.

    Backward form: ``[(p_grad - sum(p_grad * p)) * p]``, which is 0 wherever ``p`` is 0, whatever
    the mask.
    """
    scores, *seqstarts = orig_call.args
    weights, grad = ctx.normalize(widen(orig_var)), ctx.normalize(widen(output_grad))
    total = op.sum(op.multiply(grad, weights), [3], keepdims=True)
    partial = op.multiply(op.subtract(grad, total), weights)
    return [cast_like(ctx, partial, scores), *map(no_grad, seqstarts)]


@register_gradient("relax.grad.attention_backward")
def attention_backward(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of attention_backward.

    Forward form, for each head, with ``p = softmax(s)`` of the scores ``s = scale * q @ k^T``:
    ``dp = g @ v^T``, ``x = dp - r`` and ``ds = p * x``. Results: ``dq = scale * ds @ k``,
    ``dk = scale * ds^T @ q`` and ``dv = p^T @ g``. Here ``g`` is the gradient of the result ``o``,
    and ``r = sum(g * o)``.

    Backward form, with ``e = scale * (dq_grad @ k^T + q @ dk_grad^T)``, the gradient of ``ds``:

    - ``r_grad = -sum(p * e)``, ``dp_grad = p * e`` and ``p_grad = x * e + g @ dv_grad^T``;
    - ``s_grad = p * (p_grad - sum(p * p_grad))``, also the gradient of the bias;
    - ``g_grad = p @ dv_grad + dp_grad @ v + r_grad * o``, ``o_grad = r_grad * g`` and
      ``v_grad = dp_grad^T @ g``;
    - ``q_grad = scale * (ds @ dk_grad + s_grad @ k)`` and
      ``k_grad = scale * (ds^T @ dq_grad + s_grad^T @ q)``.
    """
    grad, output, query, _key, _value, *bias = orig_call.args
    heads = shape_of(query)[2]
    parts = take_apart(ctx, forward_of(orig_call))
    weights, scale = parts.weights, parts.scale

    def wide(expr):
        return ctx.emit(op.astype(expr, dtype_of(weights)))

    def turned(expr):
        return op.permute_dims(expr, [0, 1, 3, 2])

    def by_position(expr):
        return ctx.emit(op.permute_dims(wide(expr), [0, 2, 1, 3]))

    def by_feature(expr):
        return for_heads(ctx, ctx.emit(op.permute_dims(wide(expr), [0, 2, 3, 1])), heads)

    def over_keys(expr):
        return ctx.emit(op.sum(expr, [3], keepdims=True))

    def of_keys(expr, like):
        return op.permute_dims(own_heads(ctx, expr, like, heads), [0, 3, 1, 2])

    query_twist, key_twist, value_twist = (
        ctx.emit(relax.TupleGetItem(output_grad, i)) for i in range(3)
    )
    query_twist = ctx.emit(op.multiply(by_position(query_twist), scale))
    key_twist, value_twist = by_feature(key_twist), by_feature(value_twist)
    keys, values = (for_heads(ctx, tensor, heads) for tensor in (parts.key, parts.value))
    g, queries = by_position(grad), turned(parts.query)

    weights_grad = ctx.emit(op.matmul(g, values))
    inner = inner_products(ctx, wide(output), wide(grad))
    centered = ctx.emit(op.subtract(weights_grad, inner))
    scores_grad = ctx.emit(op.multiply(weights, centered))
    twist = ctx.emit(op.add(op.matmul(query_twist, keys), op.matmul(queries, key_twist)))

    dp_twist = ctx.emit(op.multiply(weights, twist))
    inner_twist = ctx.emit(op.negative(over_keys(dp_twist)))
    p_twist = ctx.emit(op.add(op.multiply(centered, twist), op.matmul(g, value_twist)))
    total = over_keys(op.multiply(weights, p_twist))
    s_twist = ctx.emit(op.multiply(weights, op.subtract(p_twist, total)))

    g_partial = op.add(op.matmul(weights, turned(value_twist)), op.matmul(dp_twist, turned(values)))
    q_partial = op.add(op.matmul(scores_grad, turned(key_twist)), op.matmul(s_twist, turned(keys)))
    k_partial = op.add(op.matmul(turned(query_twist), scores_grad), op.matmul(parts.query, s_twist))
    v_partial = op.matmul(turned(g), dp_twist)
    g_partial = op.add(g_partial, op.multiply(inner_twist, by_position(output)))
    output_partial = op.multiply(inner_twist, g)
    partials = [
        op.permute_dims(g_partial, [0, 2, 1, 3]),
        op.permute_dims(output_partial, [0, 2, 1, 3]),
        op.permute_dims(op.multiply(q_partial, scale), [0, 2, 1, 3]),
        of_keys(k_partial, parts.key),
        of_keys(v_partial, parts.value),
    ]
    partials = cast_each(ctx, partials, orig_call.args[:5])
    return [*partials, *(cast_like(ctx, unbroadcast(ctx, s_twist, term), term) for term in bias)]
