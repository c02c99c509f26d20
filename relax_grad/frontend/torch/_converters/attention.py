"""Converters of attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from tvm import relax, tirx

from ....ir.compat import Analyzer
from ....ir.dtypes import HALVES
from ....op.attention_dropout import attention_dropout
from ...random import dropout
from ._call import Call, converts, dtype, extents_of, scalar, wide_dtype
from ._support import Converter, Refused
from .random import drawn

ATTENTION: dict[str, Converter] = {}

_op = relax.op

#: The dtypes of attentions that are operators: in others, no kernel computes them.
_KINDS = "float32", *HALVES


@converts(ATTENTION, "scaled_dot_product_attention.default")
def _attention(
    call: Call,
    query: relax.Expr,
    key: relax.Expr,
    value: relax.Expr,
    attn_mask: relax.Expr | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> relax.Expr:
    """A query that may see no key has the result zero, as in PyTorch."""
    kind, inner = dtype(query), wide_dtype(dtype(query))
    if scale is None:
        width = extents_of(query)[-1]
        if not isinstance(width, int):
            raise Refused("the width of its heads is symbolic; give a scale")
        scale = 1 / math.sqrt(width)
    if kind in _KINDS:
        shaped = _with_four_axes(call, (query, key, value), attn_mask)
        if shaped is not None and _is_operator(shaped, is_causal):
            result = _operator(call, shaped, is_causal, scale, dropout_p)
            return shaped.result(call, result, query.ty.ndim)
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


class _Shaped(NamedTuple):
    """An attention as (batch, heads, positions, features or keys).

    Attributes
    ----------
    operands : list[relax.Expr]
        Queries, keys and values.
    mask : relax.Expr, optional
        The mask, whose first axes may be missing.
    batch : list
        The extents of the axes that became one.
    """

    operands: list[relax.Expr]
    mask: relax.Expr | None
    batch: list

    def result(self, call: Call, result: relax.Expr, rank: int) -> relax.Expr:
        """Return the result with as many axes as the operands had."""
        if rank == 4:
            return result
        _, *rest = extents_of(call.emit(result))
        return _op.reshape(result, [*self.batch, *(rest[1:] if rank == 3 else rest)])


def _with_four_axes(call: Call, operands: tuple, mask: relax.Expr | None) -> _Shaped | None:
    """Return an attention with four axes, or None if its operands have less than three.

    Axes of the batch are broadcast and become one. Without an axis of heads, there is one head. A
    mask of one key is one of all keys.
    """
    rank, batch = operands[0].ty.ndim, _batch(operands)
    if batch is None or (mask is not None and mask.ty.ndim > rank):
        return None
    shaped = [_reshaped(call, operand, extents_of(operand), batch) for operand in operands]
    if mask is None:
        return _Shaped(shaped, None, batch)
    keys, own = extents_of(operands[1])[-2], extents_of(mask)
    if own and own[-1] == 1 and keys != 1:
        own = [*own[:-1], keys]
        mask = call.emit(_op.broadcast_to(mask, own))
    if rank != 4:
        own = [*[1] * (rank - len(own)), *own]
        ones = [1] * len(batch)
        is_shared = _are_same(own[: len(batch)], ones)
        mask = _reshaped(call, mask, own, ones if is_shared else batch)
    return _Shaped(shaped, mask, batch)


def _batch(operands: tuple) -> list | None:
    """Return the extents of the batch of queries, keys and values: of all axes before the heads, or
    of the first of three; None if they have others."""
    rank = operands[0].ty.ndim
    if rank < 3 or any(operand.ty.ndim != rank for operand in operands):
        return None
    batch = []
    firsts = (extents_of(operand)[: max(rank - 3, 1)] for operand in operands)
    for extents in zip(*firsts, strict=True):
        full = next((extent for extent in extents if not _are_same([extent], [1])), 1)
        if not all(_are_same([extent], [full]) or _are_same([extent], [1]) for extent in extents):
            return None
        batch.append(full)
    return batch


def _reshaped(call: Call, tensor: relax.Expr, own: list, batch: list) -> relax.Expr:
    """Return a tensor of some extents whose first axes are broadcast to the batch's, and
    become one."""
    rest = own[len(batch) :]
    full = [*batch, *rest]
    if not _are_same(extents_of(tensor), full):
        if tensor.ty.ndim < len(full):
            tensor = call.emit(_op.expand_dims(tensor, list(range(len(full) - tensor.ty.ndim))))
        tensor = call.emit(_op.broadcast_to(tensor, full))
    if len(batch) == 1 and len(rest) == 3:
        return tensor
    heads = rest if len(rest) == 3 else [1, *rest]
    return call.emit(_op.reshape(tensor, [math.prod(batch), *heads]))


def _is_operator(shaped: _Shaped, is_causal: bool) -> bool:
    """Tell whether there is an operator for an attention.

    It has no matrix of weights in memory on CPUs. In half precision, it rounds the result once;
    PyTorch's also rounds the weights.
    """
    operands, mask = shaped.operands, shaped.mask
    kind = dtype(operands[0])
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
    if len(extents) != len(others):
        return False
    first, other = (
        [tirx.IntImm("int64", extent) if isinstance(extent, int) else extent for extent in list_]
        for list_ in (extents, others)
    )
    return all(map(Analyzer().can_prove_equal, first, other))


def _operator(
    call: Call, shaped: _Shaped, is_causal: bool, scale: float, rate: float
) -> relax.Expr:
    """Return an attention as an operator, whose operands have the positions before the heads."""
    permuted = [call.emit(_op.permute_dims(operand, [0, 2, 1, 3])) for operand in shaped.operands]
    mask = shaped.mask
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


def _dropping(
    bb: relax.BlockBuilder,
    seed: relax.Expr,
    stream: int,
    operands: Any,
    rate: float,
    bias: relax.Expr | None,
    attrs: dict,
) -> relax.Expr:
    """Return an attention with dropout of its weights."""
    stream = relax.const(stream, "int64")
    query, key, value = operands
    return attention_dropout(query, key, value, seed, stream, rate=rate, bias=bias, **attrs)


def dropped(call: Call, data: relax.Expr, share: float) -> relax.Expr:
    """Return data with a share of the elements zero, and the others larger in proportion."""
    return drawn(call.importer, dropout, data, share)[0]


def _lowest(kind: str) -> float:
    """Return a finite number that softmax takes to zero beside any score."""
    return -1e30 if kind == "float32" else -1e300


def _repeated(call: Call, query: relax.Expr, data: relax.Expr) -> relax.Expr:
    """Return keys or values once for each head of the queries."""
    wanted, heads = extents_of(query)[-3], extents_of(data)[-3]
    if wanted == heads:
        return data
    return call.emit(_op.repeat(data, wanted // heads, data.ty.ndim - 3))


def _causal(call: Call, rows: int | tirx.Expr, columns: int) -> relax.Expr:
    """Return the matrix that lets each query see the keys up to its own place."""
    if isinstance(rows, int) and isinstance(columns, int):
        return relax.const(np.tri(rows, columns, dtype="bool"))
    places = [call.numbers(bounds) for bounds in (rows, columns)]
    return call.emit(
        _op.greater_equal(_op.expand_dims(places[0], 1), _op.expand_dims(places[1], 0))
    )
