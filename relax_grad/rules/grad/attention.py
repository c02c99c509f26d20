"""Gradients of the weights of attention, of its gradient, and of attention with dropout."""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op
from tvm.relax import op

from ...op.attention import (
    check_masks,
    for_heads,
    forward_of,
    gradients,
    inner_products,
    own_heads,
    shared_by,
    take_apart,
)
from ...op.attention_dropout import ATTENTION_DROPOUT, ATTENTION_DROPOUT_BACKWARD
from ...registry import register_gradient
from .._util import (
    cast_each,
    cast_like,
    dtype_of,
    no_grad,
    shape_of,
    unbroadcast,
    wide_dtype,
    widen,
)

_DROPOUT, _DROPOUT_BACKWARD = map(Op.get, (ATTENTION_DROPOUT, ATTENTION_DROPOUT_BACKWARD))


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


@register_gradient("relax.grad.seeded_dropout")
def seeded_dropout(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of seeded_dropout.

    Forward form: ``y = seeded_dropout(x, seed, stream, rate)``, linear in ``x``.

    Backward form: ``[seeded_dropout(y_grad, seed, stream, rate), no_grad, no_grad, no_grad]``.
    """
    _, *generator = orig_call.args
    return [
        relax.Call(orig_call.op, [output_grad, *generator]),
        *map(no_grad, generator),
    ]


@register_gradient("relax.grad.attention_dropout")
def attention_dropout(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of attention_dropout.

    Forward form, for each head: ``o = d(p) @ v`` with ``p = softmax(scale * q @ k^T + bias)`` and
    ``d = seeded_dropout``.

    Backward form: ``attention_dropout_backward(o_grad, o, q, k, v, seed, stream, rate, bias)``. In
    half precision, the rounding error of ``o`` is too large for that: ``o`` is computed again, in
    float32. For the bias, it is the gradient of the scores, summed over the axes along which the
    bias was broadcast.
    """
    check_masks(orig_call)
    query, key, value, *others = orig_call.args
    generator, bias = others[:3], others[3:]
    for tensor in (key, value):
        shared_by(tensor, shape_of(query)[2], axis=2)
    output, operands = orig_var, [query, key, value, *bias]
    is_precise = dtype_of(orig_var) == wide_dtype(orig_var)
    scores_grad = None
    if bias:
        precise = output if is_precise else None
        scores_grad = gradients(ctx, orig_call, precise, output_grad)[1]
    if not is_precise:
        operands = [ctx.emit(widen(operand)) for operand in operands]
        output_grad = ctx.emit(widen(output_grad))
    arguments = [*operands[:3], *generator, *operands[3:]]
    if not is_precise:
        output = ctx.emit(relax.Call(orig_call.op, arguments, orig_call.attrs))
    arguments = [output_grad, output, *arguments]
    partials = ctx.emit(relax.Call(_DROPOUT_BACKWARD, arguments, orig_call.attrs))
    grads = [
        cast_like(ctx, relax.TupleGetItem(partials, i), operand)
        for i, operand in enumerate((query, key, value))
    ]
    of_bias = [cast_like(ctx, unbroadcast(ctx, scores_grad, operand), operand) for operand in bias]
    return [*grads, *map(no_grad, generator), *of_bias]


@register_gradient("relax.grad.attention_dropout_backward")
def attention_dropout_backward(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of attention_dropout_backward.

    Forward form: as :func:`attention_backward` with ``dp = d(g @ v^T)`` and ``dv = d(p)^T @
    g``, where ``d = seeded_dropout``.

    Backward form: as :func:`attention_backward` with ``p_grad = x * e + d(g @ dv_grad^T)``,
    ``g_grad = d(p) @ dv_grad + d(dp_grad) @ v + r_grad * o`` and ``v_grad = d(dp_grad)^T @ g``.
    """
    grad, output, *operands = orig_call.args
    forward = relax.Call(_DROPOUT, operands, orig_call.attrs)
    partials = _second(forward, grad, output, output_grad, ctx)
    generator = operands[3:6]
    return [*partials[:5], *map(no_grad, generator), *partials[5:]]


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
    grad, output = orig_call.args[:2]
    return _second(forward_of(orig_call), grad, output, output_grad, ctx)


def _second(
    forward: relax.Call,
    grad: relax.Expr,
    output: relax.Expr,
    output_grad: relax.Expr,
    ctx: relax.BlockBuilder,
) -> list[relax.Expr]:
    """Return the partials of the gradient of an attention: of ``grad``, ``output``, queries, keys,
    values, and of the bias if there is one."""
    query, key, value = forward.args[:3]
    bias = forward.args[6 if forward.op == _DROPOUT else 3 :]
    heads = shape_of(query)[2]
    parts = take_apart(ctx, forward)
    weights, scale = parts.weights, parts.scale

    def wide(expr: relax.Expr) -> relax.Expr:
        return ctx.emit(op.astype(expr, dtype_of(weights)))

    def turned(expr: relax.Expr) -> relax.Expr:
        return op.permute_dims(expr, [0, 1, 3, 2])

    def by_position(expr: relax.Expr) -> relax.Expr:
        return ctx.emit(op.permute_dims(wide(expr), [0, 2, 1, 3]))

    def by_feature(expr: relax.Expr) -> relax.Expr:
        return for_heads(ctx, ctx.emit(op.permute_dims(wide(expr), [0, 2, 3, 1])), heads)

    def over_keys(expr: relax.Expr) -> relax.Expr:
        return ctx.emit(op.sum(expr, [3], keepdims=True))

    def of_keys(expr: relax.Expr, like: relax.Expr) -> relax.Expr:
        return op.permute_dims(own_heads(ctx, expr, like, heads), [0, 3, 1, 2])

    query_twist, key_twist, value_twist = (
        ctx.emit(relax.TupleGetItem(output_grad, i)) for i in range(3)
    )
    query_twist = ctx.emit(op.multiply(by_position(query_twist), scale))
    key_twist, value_twist = by_feature(key_twist), by_feature(value_twist)
    keys, values = (for_heads(ctx, tensor, heads) for tensor in (parts.key, parts.value))
    g, queries = by_position(grad), turned(parts.query)

    def dropped(expr: relax.Expr) -> relax.Expr:
        return parts.dropped(ctx, expr if isinstance(expr, relax.Var) else ctx.emit(expr))

    weights_grad = dropped(op.matmul(g, values))
    inner = inner_products(ctx, wide(output), wide(grad))
    centered = ctx.emit(op.subtract(weights_grad, inner))
    scores_grad = ctx.emit(op.multiply(weights, centered))
    twist = ctx.emit(op.add(op.matmul(query_twist, keys), op.matmul(queries, key_twist)))

    dp_twist = ctx.emit(op.multiply(weights, twist))
    inner_twist = ctx.emit(op.negative(over_keys(dp_twist)))
    p_twist = ctx.emit(op.add(op.multiply(centered, twist), dropped(op.matmul(g, value_twist))))
    total = over_keys(op.multiply(weights, p_twist))
    s_twist = ctx.emit(op.multiply(weights, op.subtract(p_twist, total)))

    dropped_twist = dropped(dp_twist)
    g_partial = op.matmul(dropped(weights), turned(value_twist))
    g_partial = op.add(g_partial, op.matmul(dropped_twist, turned(values)))
    q_partial = op.add(op.matmul(scores_grad, turned(key_twist)), op.matmul(s_twist, turned(keys)))
    k_partial = op.add(op.matmul(turned(query_twist), scores_grad), op.matmul(parts.query, s_twist))
    v_partial = op.matmul(turned(g), dropped_twist)
    g_partial = op.add(g_partial, op.multiply(inner_twist, by_position(output)))
    output_partial = op.multiply(inner_twist, g)
    partials = [
        op.permute_dims(g_partial, [0, 2, 1, 3]),
        op.permute_dims(output_partial, [0, 2, 1, 3]),
        op.permute_dims(op.multiply(q_partial, scale), [0, 2, 1, 3]),
        of_keys(k_partial, parts.key),
        of_keys(v_partial, parts.value),
    ]
    partials = cast_each(ctx, partials, [grad, output, query, key, value])
    return [*partials, *(cast_like(ctx, unbroadcast(ctx, s_twist, term), term) for term in bias)]
