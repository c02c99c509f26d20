"""The building blocks of attention that its forward and its gradient share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

from ..ir.compat import Analyzer, dtype_of, shapes_differ
from ..ir.dtypes import accumulation_dtype
from ._infer import tensor_type
from .declare import declare_op
from .manipulate import repeat_backward_data
from .norm import divide_by_count

_SEQSTARTS = ((1, "seqstart_q"), (2, "seqstart_k"))


def attention_weights(
    scores: relax.Expr,
    seqstart_q: relax.Expr | None = None,
    seqstart_k: relax.Expr | None = None,
    scale: None = None,
    causal_mask: str | None = None,
    window_size: int | None = None,
) -> relax.Call:
    """Softmax over the keys that each query attends to.

    ``relax.op.nn.softmax`` of masked scores needs a mask as large as the scores. No constant can be
    that mask for symbolic extents or sequences of different lengths. It is also NaN where a query
    attends to no key.

    Parameters
    ----------
    scores : relax.Expr
        The scores with scale and bias, of shape ``(batch, heads, queries, keys)``.
    seqstart_q, seqstart_k : relax.Expr, optional
        As given to ``relax.op.nn.attention_var_len``.
    scale
        Not used: the scores are already scaled.
    causal_mask, window_size
        As given to ``relax.op.nn.attention``.

    Returns
    -------
    result : relax.Call
        The weights, of the type of the scores; half precision is computed in float32. A masked key
        has weight 0. All keys have weight 0 if a query attends to none, or to none with a score
        above minus infinity.
    """
    seqstarts = [seqstart for seqstart in (seqstart_q, seqstart_k) if seqstart is not None]
    attrs = op.nn.attention(scores, scores, scores, None, scale, causal_mask, window_size).attrs
    return relax.Call(Op.get("relax.grad.attention_weights"), [scores, *seqstarts], attrs)


def attention_backward(
    output_grad: relax.Expr,
    output: relax.Expr,
    query: relax.Expr,
    key: relax.Expr,
    value: relax.Expr,
    bias: relax.Expr | None = None,
    scale: float | None = None,
    causal_mask: str | None = None,
    window_size: int | None = None,
) -> relax.Call:
    """Gradient of attention with respect to queries, keys and values.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result.
    output : relax.Expr
        The result. In half precision, its rounding error becomes an error of the gradients.
    query, key, value, bias
        As given to ``relax.op.nn.attention`` or ``attention_bias``.
    scale, causal_mask, window_size
        As given to ``relax.op.nn.attention``.

    Returns
    -------
    result : relax.Call
        The gradients, a tuple of the types of queries, keys and values; half precision is computed
        in float32.
    """
    operands = [query, key, value, *([] if bias is None else [bias])]
    attrs = op.nn.attention(query, key, value, None, scale, causal_mask, window_size).attrs
    return relax.Call(
        Op.get("relax.grad.attention_backward"), [output_grad, output, *operands], attrs
    )


def forward_of(call: relax.Call) -> relax.Call:
    """Return the attention call whose gradient a call of ``attention_backward`` is."""
    operands = call.args[2:]
    name = "relax.nn.attention_bias" if len(operands) == 4 else "relax.nn.attention"
    return relax.Call(Op.get(name), operands, call.attrs)


def gradients(
    bb: relax.BlockBuilder,
    call: relax.Call,
    output: relax.Expr | None,
    output_grad: relax.Expr,
) -> tuple[list[relax.Expr], relax.Expr]:
    """Emit the gradients of an attention call as a composition of operators.

    With ``dp = o_grad @ v^T`` and ``ds = p * (dp - sum(dp * p))``, where the sum is over the keys,
    they are ``[scale * ds @ k, scale * ds^T @ q, p^T @ o_grad]``. The last two are summed over the
    query heads that share a head of the keys or of the values.

    The weights ``p`` are recomputed from ``q`` and ``k``, in float32 at least. ``sum(dp * p)`` is
    ``sum(o_grad * o)`` over the features, which saves two passes over tensors as large as the
    weights.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The block builder.
    call : relax.Call
        A call of ``relax.nn.attention``, ``attention_bias``, ``attention_var_len`` or
        ``relax.grad.attention_dropout``.
    output : relax.Expr or None
        Its result, or None if the rounding error of the result is too large for
        ``sum(o_grad * o)``.
    output_grad : relax.Expr
        The gradient with respect to the result.

    Returns
    -------
    gradients, scores_grad : tuple[list[relax.Expr], relax.Expr]
        The gradients of queries, keys and values, in their dtypes, and of the scores.
    """
    query, key, value = call.args[:3]
    parts = take_apart(bb, call)
    heads, wide = query.ty.shape.values[2], dtype_of(parts.weights.ty)
    grad = bb.emit(_cast(output_grad, wide))
    by_position = bb.emit(op.permute_dims(grad, [0, 2, 1, 3]))
    by_feature = bb.emit(op.permute_dims(grad, [0, 2, 3, 1]))
    weights_grad = bb.emit(op.matmul(by_position, for_heads(bb, parts.value, heads)))
    weights_grad = parts.dropped(bb, weights_grad)
    if output is None:
        inner = op.sum(op.multiply(weights_grad, parts.weights), [3], keepdims=True)
    else:
        inner = inner_products(bb, _cast(output, wide), grad)
    scores_grad = bb.emit(op.multiply(parts.weights, op.subtract(weights_grad, inner)))
    keys = for_heads(bb, parts.key, heads)
    query_grad = op.matmul(scores_grad, op.permute_dims(keys, [0, 1, 3, 2]))
    key_grad = op.matmul(parts.query, scores_grad)
    value_grad = op.matmul(by_feature, parts.dropped(bb, parts.weights))
    partials = [
        op.permute_dims(op.multiply(query_grad, parts.scale), [0, 2, 1, 3]),
        op.permute_dims(own_heads(bb, key_grad, parts.key, heads), [0, 3, 1, 2]),
        op.permute_dims(own_heads(bb, value_grad, parts.value, heads), [0, 3, 1, 2]),
    ]
    dtypes = [dtype_of(operand.ty) for operand in (query, key, value)]
    partials = [bb.normalize(partial) for partial in partials]
    return list(map(_cast, partials, dtypes)), scores_grad


def inner_products(bb: relax.BlockBuilder, output: relax.Expr, grad: relax.Expr) -> relax.Expr:
    """Emit the sums over the features of the result times its gradient,
    ``(batch, heads, queries, 1)``."""
    inner = op.sum(op.multiply(grad, output), [3], keepdims=True)
    return bb.emit(op.permute_dims(inner, [0, 2, 1, 3]))


def _cast(expr: relax.Expr, dtype: str) -> relax.Expr:
    return expr if dtype_of(expr.ty) == dtype else op.astype(expr, dtype)


def own_heads(
    bb: relax.BlockBuilder, grad: relax.Expr, like: relax.Expr, heads: tirx.PrimExpr
) -> relax.Expr:
    """Sum a gradient (heads in axis 1) over the query heads that share a head of keys or values."""
    shared = shared_by(like, heads)
    if shared == 1:
        return grad
    # A symbolic shape is read off the tensor, so that TVM's Gradient pass can traverse the result.
    is_static = all(isinstance(extent, tirx.IntImm) for extent in like.ty.shape.values)
    shape = like.ty.shape if is_static else op.shape_of(like)
    return repeat_backward_data(bb.emit(grad), shape, shared, 1)


@dataclass(frozen=True)
class Attention:
    """The operands and weights of an attention call, in float32 at least, each bound to a variable.

    Attributes
    ----------
    query : relax.Expr
        The scaled queries, with the axis of the features before the axis of the positions:
        ``(batch, heads, features, queries)``.
    scale : relax.Expr
        The factor that the queries were scaled by.
    key, value : relax.Expr
        ``(batch, heads of the keys, features, keys)`` and ``(batch, heads of the values, features,
        keys)``.
    weights : relax.Expr
        ``(batch, heads, queries, keys)``.
    generator : Sequence[relax.Expr]
        The seed, the stream and the rate of the dropout of the weights; empty without dropout.
    """

    query: relax.Expr
    scale: relax.Expr
    key: relax.Expr
    value: relax.Expr
    weights: relax.Expr
    generator: Sequence[relax.Expr] = ()

    def dropped(self, bb: relax.BlockBuilder, expr: relax.Expr) -> relax.Expr:
        """Return a tensor of the shape of the weights after their dropout, which is linear."""
        if not self.generator:
            return expr
        return bb.emit(relax.Call(Op.get("relax.grad.seeded_dropout"), [expr, *self.generator]))


def take_apart(bb: relax.BlockBuilder, call: relax.Call) -> Attention:
    """Emit the weights of an attention call and the operands that they are computed from.

    Raises
    ------
    ValueError
        If the masks that the call asks for have no agreed meaning.
    """
    query, key, value, *others = call.args
    generator = []
    if call.op.name == "relax.grad.attention_dropout":
        generator, others = others[:3], others[3:]
    check_masks(call)
    wide = accumulation_dtype(*(dtype_of(argument.ty) for argument in call.args[:3]))

    def widened(expr: relax.Expr) -> relax.Expr:
        return expr if dtype_of(expr.ty) == wide else bb.emit(op.astype(expr, wide))

    def features_first(expr: relax.Expr) -> relax.Expr:
        return bb.emit(op.permute_dims(widened(expr), [0, 2, 3, 1]))

    scale = _scale(bb, call, wide)
    queries = bb.emit(op.multiply(features_first(query), scale))
    keys, values = features_first(key), features_first(value)
    heads = query.ty.shape.values[2]
    scores = op.matmul(op.permute_dims(queries, [0, 1, 3, 2]), for_heads(bb, keys, heads))
    seqstart_q, seqstart_k = None, None
    if call.op.name == "relax.nn.attention_var_len":
        seqstart_q, seqstart_k = others[:2]
    elif others:
        scores = op.add(scores, widened(others[0]))
    window_size = call.attrs.window_size
    weights = attention_weights(
        bb.emit(scores),
        seqstart_q,
        seqstart_k,
        causal_mask=call.attrs.causal_mask,
        window_size=None if window_size is None else int(window_size),
    )
    return Attention(
        queries, scale, keys, value=values, weights=bb.emit(weights), generator=generator
    )


def for_heads(bb: relax.BlockBuilder, expr: relax.Expr, heads: tirx.PrimExpr) -> relax.Expr:
    """Repeat each head (axis 1) of keys or values for all query heads that share it."""
    repeats = shared_by(expr, heads)
    return expr if repeats == 1 else bb.emit(op.repeat(expr, repeats, 1))


def shared_by(expr: relax.Expr, heads: tirx.PrimExpr, axis: int = 1) -> int:
    """Return the number of query heads that share one head of keys or values.

    Raises
    ------
    ValueError
        If that number is unknown.
    """
    own = expr.ty.shape.values[axis]
    if Analyzer().can_prove_equal(own, heads):
        return 1
    if not (isinstance(own, tirx.IntImm) and isinstance(heads, tirx.IntImm)):
        raise ValueError(
            f"the number of heads must be the same, or constant, but the queries have {heads} "
            f"and the keys or values {own}"
        )
    return int(heads) // int(own)


def _scale(bb: relax.BlockBuilder, call: relax.Call, dtype: str) -> relax.Expr:
    """Return the scale as a scalar; by default ``1 / sqrt(number of features)``."""
    features = call.args[0].ty.shape.values[3]
    if call.attrs.scale is not None:
        return relax.const(float(call.attrs.scale), dtype)
    if isinstance(features, tirx.IntImm):
        return relax.const(1 / math.sqrt(int(features)), dtype)
    share = divide_by_count(relax.const(1.0, dtype), op.shape_of(call.args[0]), [3])
    return bb.emit(op.sqrt(bb.emit(share)))


def check_masks(call: relax.Call) -> None:
    """Check the masks of an attention call.

    Raises
    ------
    ValueError
        If the masks that the call asks for have no agreed meaning.
    """
    causal_mask = call.attrs.causal_mask
    if causal_mask not in (None, "TopLeft", "BottomRight"):
        raise ValueError(
            f"causal_mask must be 'TopLeft' or 'BottomRight', but it is {causal_mask!r}"
        )
    if call.attrs.window_size is None:
        return
    if causal_mask is None:
        raise ValueError("a window is defined with a causal mask only; give causal_mask")
    if causal_mask == "TopLeft":
        return
    if call.op.name == "relax.nn.attention_var_len":
        same = call.args[3].same_as(call.args[4])
    else:
        lengths = [argument.ty.shape.values[1] for argument in call.args[:2]]
        same = Analyzer().can_prove_equal(*lengths)
    if not same:
        raise ValueError(
            "a window with causal_mask='BottomRight' is defined only for as many keys as queries, "
            "because implementations disagree about its keys otherwise; use causal_mask='TopLeft'"
        )


def _infer_attention_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    names = ("output_grad", "output", "query", "key", "value", "bias")
    kinds = [tensor_type(call, i, name) for i, name in enumerate(names[: len(call.args)])]
    return check_gradient_types(call, ctx, kinds, forward_of(call))


def check_gradient_types(
    call: relax.Call, ctx: relax.BlockBuilder, kinds: list, forward: relax.Call
) -> relax.Type:
    """Check the types of the tensors of a gradient of attention, and return the gradients' type.

    The tensors are the gradient of the result, the result, queries, keys, values, and a bias if
    there is one. ``forward`` is the attention.
    """
    names = ("output_grad", "output", "query", "key", "value", "bias")
    for name, kind in zip(names, kinds, strict=False):
        if kind.ndim != 4:
            raise ValueError(
                f"{call.op.name}: {name} must have 4 dimensions, but its type is {kind}"
            )
    result = ctx.normalize(forward).ty
    for name, kind in zip(names[:2], kinds, strict=False):
        if shapes_differ(kind, result):
            raise ValueError(
                f"{call.op.name}: {name} must have the shape of the result of the attention, "
                f"{result}, but its type is {kind}"
            )
    return relax.TupleType(kinds[2:5])


def _infer_attention_weights(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    scores = tensor_type(call, 0, "scores")
    if scores.ndim != 4:
        raise ValueError(
            f"{call.op.name}: scores must have the 4 dimensions (batch, heads, queries, keys), "
            f"but its type is {scores}"
        )
    if call.attrs.scale is not None:
        raise ValueError(
            f"{call.op.name}: scale must not be given, as the scores are scaled already, but it is "
            f"{float(call.attrs.scale)}"
        )
    if call.attrs.causal_mask not in (None, "TopLeft", "BottomRight"):
        raise ValueError(
            f"{call.op.name}: causal_mask must be 'TopLeft' or 'BottomRight', but it is "
            f"{call.attrs.causal_mask!r}"
        )
    if len(call.args) == 2:
        raise ValueError(f"{call.op.name}: seqstart_q and seqstart_k must be given together")
    seqstarts = [tensor_type(call, i, name) for i, name in _SEQSTARTS[: len(call.args) - 1]]
    for (_, name), seqstart in zip(_SEQSTARTS, seqstarts, strict=False):
        if seqstart.ndim != 1 or not dtype_of(seqstart).startswith("int"):
            raise ValueError(
                f"{call.op.name}: {name} must be a vector of integers, but its type is {seqstart}"
            )
    if seqstarts and shapes_differ(*seqstarts):
        raise ValueError(
            f"{call.op.name}: there must be as many sequences of queries as of keys, but the "
            f"types of seqstart_q and seqstart_k are {seqstarts[0]} and {seqstarts[1]}"
        )
    return scores


#: The operands of attention, its bias, and the operands that its gradient takes before them, as
#: :func:`declare_op` takes them.
OPERANDS = [
    ("query", "Tensor", "The queries."),
    ("key", "Tensor", "The keys."),
    ("value", "Tensor", "The values."),
]
BIAS = ("bias", "Optional[Tensor]", "The bias of the scores.")
OUTPUTS = [
    ("output_grad", "Tensor", "The gradient with respect to the result."),
    ("output", "Tensor", "The result."),
]

declare_op(
    "attention_weights",
    [
        ("scores", "Tensor", "The scores."),
        ("seqstart_q", "Optional[Tensor]", "The start of each sequence of queries."),
        ("seqstart_k", "Optional[Tensor]", "The start of each sequence of keys."),
    ],
    _infer_attention_weights,
    attention_weights,
    "relax.attrs.AttentionAttrs",
)

declare_op(
    "attention_backward",
    [*OUTPUTS, *OPERANDS, BIAS],
    _infer_attention_backward,
    attention_backward,
    "relax.attrs.AttentionAttrs",
)
