"""Converters of attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import relax, tirx

from ....ir.compat import Analyzer
from ....ir.dtypes import HALVES
from ....op.attention_dropout import attention_dropout
from ...random import dropout
from ._call import converts, dtype, extents_of, scalar, wide_dtype
from ._support import Refused
from .random import drawn

ATTENTION: dict[str, Callable] = {}

_op = relax.op

#: The dtypes of attentions that are operators: in others, no kernel computes them.
_KINDS = "float32", *HALVES


@converts(ATTENTION, "scaled_dot_product_attention.default")
def _attention(call, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """A query that may see no key has the result zero, as in PyTorch."""
    kind, inner = dtype(query), wide_dtype(dtype(query))
    if scale is None:
        width = extents_of(query)[-1]
        if not isinstance(width, int):
            raise Refused("the width of its heads is symbolic; give a scale")
        scale = 1 / math.sqrt(width)
    if kind in _KINDS and _is_operator(query, key, value, attn_mask, is_causal):
        return _operator(call, (query, key, value), attn_mask, is_causal, scale, dropout_p)
    if enable_gqa:
        key, value = (_repeated(call, query, tensor) for tensor in (key, value))
    rank = key.ty.ndim
    turned = call.emit(_op.permute_dims(key, [*range(rank - 2), rank - 1, rank - 2]))
    wide = None if kind == inner else inner  # scores in half precision are not rounded
    scores = call.emit(_op.matmul(query, turned, out_dtype=wide))
    scores = call.emit(_op.multiply(scores, call.tensor(scale, inner)))
    allowed = None
    if attn_mask is not None:
        if dtype(attn_mask) == "bool":
            allowed = attn_mask
        else:
            bias = call.cast(attn_mask, inner)
            allowed = call.emit(_op.greater(bias, scalar(-math.inf, inner)))
            bias = call.emit(_op.where(allowed, bias, scalar(0, inner)))
            scores = call.emit(_op.add(scores, bias))
    if is_causal:
        rows, columns = extents_of(query)[-2], extents_of(key)[-2]
        past = _causal(call, rows, columns)
        allowed = past if allowed is None else call.emit(_op.logical_and(allowed, past))
    if allowed is not None:
        scores = call.emit(_op.where(allowed, scores, scalar(_lowest(inner), inner)))
    weights = call.emit(_op.nn.softmax(scores, -1))
    if attn_mask is not None:
        weights = call.emit(_op.where(allowed, weights, scalar(0, inner)))
    weights = call.cast(weights, kind)
    if dropout_p:
        weights = dropped(call, weights, dropout_p)
    return _op.matmul(weights, value)


def _is_operator(query, key, value, mask, is_causal: bool) -> bool:
    """Tell whether there is an operator for an attention.

    It has no matrix of weights in memory on CPUs. In half precision, it rounds the result once;
    PyTorch's also rounds the weights.
    """
    operands, kind = (query, key, value), dtype(query)
    if any(dtype(operand) != kind or operand.ty.ndim != 4 for operand in operands):
        return False
    shapes = [extents_of(operand) for operand in operands]
    batch, heads, queries, features = shapes[0]
    keys = shapes[1][2]
    fixed = [heads, shapes[1][1], features, shapes[2][3]]
    if not all(isinstance(extent, int) and extent for extent in fixed) or heads % fixed[1]:
        return False
    wanted = [[batch, fixed[1], keys, features], [batch, fixed[1], keys, fixed[3]]]
    if not all(map(_are_same, shapes[1:], wanted)):
        return False
    if mask is None:
        return True
    extents = extents_of(mask)
    full = [batch, heads, queries, keys][4 - len(extents) :] if len(extents) <= 4 else None
    return (
        not is_causal
        and dtype(mask) in ("bool", kind)
        and full is not None
        and bool(extents)
        and _are_same(extents[-1:], full[-1:])
        and all(
            extent == 1 or _are_same([extent], [all_])
            for extent, all_ in zip(extents, full, strict=True)
        )
    )


def _are_same(extents: list, others: list) -> bool:
    """Tell whether extents are equal whatever the values of their variables are."""
    first, other = (
        [tirx.IntImm("int64", extent) if isinstance(extent, int) else extent for extent in list_]
        for list_ in (extents, others)
    )
    return all(map(Analyzer().can_prove_equal, first, other))


def _operator(
    call, operands: tuple, mask, is_causal: bool, scale: float, rate: float
) -> relax.Expr:
    """Return an attention as an operator, whose operands have the positions before the heads."""
    permuted = [call.emit(_op.permute_dims(operand, [0, 2, 1, 3])) for operand in operands]
    attrs = {"scale": scale, "causal_mask": "TopLeft" if is_causal else None}
    bias = None
    if mask is not None:
        if dtype(mask) == "bool":
            kind = dtype(permuted[0])
            zero, infinite = (scalar(value, kind) for value in (0, -math.inf))
            mask = call.emit(_op.where(mask, zero, infinite))
        missing = 4 - mask.ty.ndim
        bias = call.emit(_op.expand_dims(mask, list(range(missing)))) if missing else mask
    if rate:
        result = drawn(call.importer, _dropping, permuted, rate, bias, attrs)
    elif bias is None:
        result = _op.nn.attention(*permuted, **attrs)
    else:
        result = _op.nn.attention_bias(*permuted, bias, **attrs)
    return _op.permute_dims(call.emit(result), [0, 2, 1, 3])


def _dropping(bb, seed, stream, operands, rate: float, bias, attrs: dict) -> relax.Expr:
    """Return an attention with dropout of its weights."""
    stream = relax.const(stream, "int64")
    query, key, value = operands
    return attention_dropout(query, key, value, seed, stream, rate, bias, **attrs)


def dropped(call, data, share: float) -> relax.Expr:
    """Return data with a share of the elements zero, and the others larger in proportion."""
    return drawn(call.importer, dropout, data, share)[0]


def _lowest(kind: str) -> float:
    """Return a finite number that softmax takes to zero beside any score."""
    return -1e30 if kind == "float32" else -1e300


def _repeated(call, query, data) -> relax.Expr:
    """Return keys or values once for each head of the queries."""
    wanted, heads = extents_of(query)[-3], extents_of(data)[-3]
    if wanted == heads:
        return data
    return call.emit(_op.repeat(data, wanted // heads, data.ty.ndim - 3))


def _causal(call, rows, columns) -> relax.Expr:
    """Return the matrix that lets each query see the keys up to its own place."""
    if isinstance(rows, int) and isinstance(columns, int):
        return relax.const(np.tri(rows, columns, dtype="bool"))
    places = [call.numbers(bounds) for bounds in (rows, columns)]
    return call.emit(
        _op.greater_equal(_op.expand_dims(places[0], 1), _op.expand_dims(places[1], 0))
    )
