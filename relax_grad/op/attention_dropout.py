"""Dropout by the counter-based generator, and attention whose weights it drops.

The mask is a function of the seed, the stream and the position, so that it is computed again where
it is needed, and no memory holds it. It is the mask of :func:`relax_grad.frontend.random.dropout`
for the same seed, stream and shape.
"""

from __future__ import annotations

import math

from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

from ..ir.compat import dtype_of
from ._infer import tensor_type
from .attention import BIAS, OPERANDS, OUTPUTS, check_gradient_types
from .declare import declare_op

#: The operators of attention with dropout, forward and backward.
ATTENTION_DROPOUT = "relax.grad.attention_dropout"
ATTENTION_DROPOUT_BACKWARD = "relax.grad.attention_dropout_backward"


def seeded_dropout(
    data: relax.Expr, seed: relax.Expr, stream: relax.Expr, rate: float | relax.Expr
) -> relax.Call:
    """Dropout by the counter-based generator.

    Parameters
    ----------
    data : relax.Expr
        A floating-point tensor.
    seed, stream : relax.Expr
        The key and the stream of the generator: int64 tensors of shape (). A stream of shape (3,)
        consists of the stream, the number of the first head of the data, and the number of heads of
        an element of the batch: the data ``(batch, heads, queries, keys)`` are a part of a tensor
        with more heads, whose heads have numbers from 0 on, over the whole batch.
    rate : float or relax.Expr
        The probability of 0, a constant.

    Returns
    -------
    result : relax.Call
        The data with dropped elements 0, and the others divided by ``1 - rate``. The elements are
        those that :func:`relax_grad.frontend.random.dropout` drops.
    """
    return relax.Call(Op.get("relax.grad.seeded_dropout"), [data, seed, stream, _number(rate)])


def attention_dropout(
    query: relax.Expr,
    key: relax.Expr,
    value: relax.Expr,
    seed: relax.Expr,
    stream: relax.Expr,
    rate: float | relax.Expr,
    bias: relax.Expr | None = None,
    scale: float | None = None,
    causal_mask: str | None = None,
    window_size: int | None = None,
) -> relax.Call:
    """Attention with dropout of its weights.

    Parameters
    ----------
    query, key, value, bias
        As given to ``relax.op.nn.attention`` or ``attention_bias``.
    seed, stream, rate
        As given to :func:`seeded_dropout`, whose data are the weights, of shape ``(batch, heads,
        queries, keys)``. With a stream of shape (3,), workers that have some of the heads each drop
        the weights that one with all heads drops.
    scale, causal_mask, window_size
        As given to ``relax.op.nn.attention``.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``relax.op.nn.attention``. Kernels for CPUs compute the mask block
        by block, forward and backward.
    """
    attrs = op.nn.attention(query, key, value, None, scale, causal_mask, window_size).attrs
    operands = [query, key, value, seed, stream, _number(rate), *([] if bias is None else [bias])]
    return relax.Call(Op.get(ATTENTION_DROPOUT), operands, attrs)


def attention_dropout_backward(
    output_grad: relax.Expr,
    output: relax.Expr,
    query: relax.Expr,
    key: relax.Expr,
    value: relax.Expr,
    seed: relax.Expr,
    stream: relax.Expr,
    rate: float | relax.Expr,
    bias: relax.Expr | None = None,
    scale: float | None = None,
    causal_mask: str | None = None,
    window_size: int | None = None,
) -> relax.Call:
    """Gradient of attention_dropout with respect to queries, keys and values.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the result.
    output : relax.Expr
        The result. In half precision, its rounding error becomes an error of the gradients.
    query, key, value, seed, stream, rate, bias, scale, causal_mask, window_size
        As given to :func:`attention_dropout`.

    Returns
    -------
    result : relax.Call
        The gradients, a tuple of the types of queries, keys and values; half precision is computed
        in float32.
    """
    forward = attention_dropout(
        query,
        key,
        value,
        seed,
        stream,
        rate=rate,
        bias=bias,
        scale=scale,
        causal_mask=causal_mask,
        window_size=window_size,
    )
    operands = [output_grad, output, *forward.args]
    return relax.Call(Op.get(ATTENTION_DROPOUT_BACKWARD), operands, forward.attrs)


def rate_of(call: relax.Call) -> float:
    """Return the probability of 0 of a call of an operator with dropout."""
    names = [argument.name for argument in call.op.arguments]
    rate = call.args[names.index("rate")]
    if not isinstance(rate, (tirx.FloatImm, tirx.IntImm)):
        raise TypeError(f"{call.op.name}: rate must be a constant number, but it is {rate}")
    if not 0.0 <= float(rate.value) <= 1.0:
        raise ValueError(f"{call.op.name}: rate must be between 0 and 1, but it is {rate.value}")
    return float(rate.value)


def is_of_part(call: relax.Call) -> bool:
    """Tell whether a call of an operator with dropout drops elements as in a part of a
    tensor with more heads."""
    names = [argument.name for argument in call.op.arguments]
    return call.args[names.index("stream")].ty.ndim == 1


def _number(rate: float | relax.Expr) -> relax.Expr:
    if isinstance(rate, relax.Expr):
        return rate
    if not math.isfinite(rate):
        raise ValueError(f"rate must be between 0 and 1, but it is {rate!r}")
    return relax.prim_value(float(rate))


def _check_generator(call: relax.Call, first: int) -> None:
    """Check the seed and the stream, from an argument on, and the rate."""
    for index, name in ((first, "seed"), (first + 1, "stream")):
        kind = tensor_type(call, index, name)
        is_number = kind.ndim == 0 or (name == "stream" and _has_three_elements(kind))
        if not is_number or kind.dtype is None or dtype_of(kind) != "int64":
            shapes = "()" if name == "seed" else "(), or (3,) for a part of the heads"
            raise ValueError(
                f"{call.op.name}: {name} must be an int64 tensor of shape {shapes}, but its type "
                f"is {kind}"
            )
    rate_of(call)


def _has_three_elements(kind: relax.TensorType) -> bool:
    if kind.ndim != 1 or not isinstance(kind.shape, relax.ShapeExpr):
        return False
    (extent,) = kind.shape.values
    return isinstance(extent, tirx.IntImm) and int(extent) == 3


def _infer_dropout(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data = tensor_type(call, 0, "data")
    if data.dtype is None or not dtype_of(data).startswith(("float", "bfloat")):
        raise ValueError(
            f"{call.op.name}: data must be of floating-point numbers, but its type is {data}"
        )
    _check_generator(call, 1)
    if is_of_part(call) and data.ndim != 4:
        raise ValueError(
            f"{call.op.name}: data must have the 4 dimensions (batch, heads, queries, keys) with a "
            f"stream of shape (3,), but their type is {data}"
        )
    return data


def _infer_attention(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    for i, name in enumerate(("query", "key", "value")):
        tensor_type(call, i, name)
    _check_generator(call, 3)
    if len(call.args) > 6:
        tensor_type(call, 6, "bias")
    try:
        return ctx.normalize(without_dropout(call)).ty
    except ValueError as error:
        raise ValueError(f"{call.op.name}: query, key and value do not fit: {error}") from error


def without_dropout(call: relax.Call) -> relax.Call:
    """Return the attention whose weights a call of ``attention_dropout`` drops."""
    operands = [*call.args[:3], *call.args[6:]]
    name = "relax.nn.attention_bias" if len(operands) == 4 else "relax.nn.attention"
    return relax.Call(Op.get(name), operands, call.attrs)


def _infer_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    names = ("output_grad", "output", "query", "key", "value", "bias")
    places = [0, 1, 2, 3, 4, *range(8, len(call.args))]
    kinds = [tensor_type(call, i, name) for i, name in zip(places, names, strict=False)]
    _check_generator(call, 5)
    forward = relax.Call(Op.get(ATTENTION_DROPOUT), call.args[2:], call.attrs)
    return check_gradient_types(call, ctx, kinds, without_dropout(forward))


_GENERATOR = [
    ("seed", "Tensor", "The key of the generator."),
    ("stream", "Tensor", "The stream of the generator, perhaps with the place of the heads."),
    ("rate", "PrimExpr", "The probability of 0."),
]
_OPERANDS = [*OPERANDS, *_GENERATOR, BIAS]

declare_op(
    "seeded_dropout", [("data", "Tensor", "The data."), *_GENERATOR], _infer_dropout, seeded_dropout
)
declare_op(
    "attention_dropout",
    _OPERANDS,
    _infer_attention,
    attention_dropout,
    "relax.attrs.AttentionAttrs",
)
declare_op(
    "attention_dropout_backward",
    [*OUTPUTS, *_OPERANDS],
    _infer_backward,
    attention_dropout_backward,
    "relax.attrs.AttentionAttrs",
)
