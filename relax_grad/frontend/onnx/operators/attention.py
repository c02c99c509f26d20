"""Attention as ONNX Runtime's optimizer and its builder of models write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from ..extents.values import Extents
from .converters import Attrs, Builder, Inputs, Refused, Result, _dtype, _extents, _rank
from .fused import FUSED, _converts, _split

_CACHE = "export the model without caches of keys and values (use_cache=False)"

#: The score of keys that a mask excludes from the softmax.
_EXCLUDED = {"float16": -65504.0}


class _Heads(NamedTuple):
    """Queries, keys and values in the layout (batch, heads, steps, size)."""

    query: relax.Expr
    key: relax.Expr
    value: relax.Expr


def _without(
    inputs: Inputs, attrs: Attrs, places: dict[int, str], flags: tuple[str, ...] = ()
) -> None:
    """Refuse operands and attributes that have no meaning in training."""
    for place, name in places.items():
        if inputs[place] is not None:
            raise Refused(f"it has the operand {name}; {_CACHE}")
    for name in flags:
        if attrs.get(name, 0):
            raise Refused(
                f"it has the attribute {name}={attrs[name]}, which is not supported; {_CACHE}"
            )


def _only_output(attrs: Attrs) -> None:
    if attrs["tvm_custom"]["num_outputs"] > 1:
        raise Refused(f"its keys and values are outputs of the model; {_CACHE}")


def _in_heads(bb: Builder, data: relax.Expr, heads: int) -> relax.Expr:
    """Return (batch, steps, heads * size) as (batch, heads, steps, size)."""
    if _rank(data) == 4:
        return data
    batch, steps, width = _extents(data)
    data = bb.emit(op.reshape(data, [batch, steps, heads, width // heads]))
    return bb.emit(op.permute_dims(data, [0, 2, 1, 3]))


def _steps(bb: Builder, extent: tirx.Expr | int, dtype: str = "int64") -> relax.Expr:
    return bb.emit(op.arange(0, extent, 1, dtype))


def _unseen(
    bb: Builder, queries: tirx.Expr | int, keys: tirx.Expr | int, window: int = 0
) -> relax.Expr:
    """Return which keys come after a query, or before its window, in the layout (queries, keys)."""
    offset = bb.emit(op.expand_dims(_steps(bb, queries), 1))
    places = bb.emit(op.expand_dims(_steps(bb, keys), 0))
    later = bb.emit(op.greater(places, offset))
    if window <= 0:
        return later
    early = bb.emit(
        op.less_equal(places, bb.emit(op.subtract(offset, relax.const(window, "int64"))))
    )
    return bb.emit(op.logical_or(later, early))


def _attended(
    bb: Builder,
    heads: _Heads,
    attrs: Attrs,
    biases: Sequence[relax.Expr] = (),
    excluded: Sequence[relax.Expr] = (),
) -> relax.Expr:
    """Return ``softmax(scale * Q K^T + biases) V`` as (batch, steps, heads * size); excluded scores
    count as minus infinity."""
    query, key, value = heads
    dtype, size = _dtype(query), _extents(query)[3]
    scale = attrs.get("scale", 0.0) or 1 / math.sqrt(size)
    query = bb.emit(op.multiply(query, relax.const(scale, dtype)))
    scores = bb.emit(op.matmul(query, bb.emit(op.permute_dims(key, [0, 1, 3, 2]))))
    cap = attrs.get("softcap", 0.0)
    if cap:
        bounded = bb.emit(op.tanh(bb.emit(op.divide(scores, relax.const(cap, dtype)))))
        scores = bb.emit(op.multiply(bounded, relax.const(cap, dtype)))
    for bias in biases:
        scores = bb.emit(op.add(scores, bias))
    low = relax.const(_EXCLUDED.get(dtype, float(np.finfo(np.float32).min)), dtype)
    for mask in excluded:
        scores = bb.emit(op.where(mask, low, scores))
    shares = bb.emit(op.nn.softmax(scores, 3))
    result = bb.emit(op.permute_dims(bb.emit(op.matmul(shares, value)), [0, 2, 1, 3]))
    batch, steps, count, width = _extents(result)
    return op.reshape(result, [batch, steps, count * width])


def _mask_bias(
    bb: Builder, mask: relax.Expr, data: relax.Expr, steps: tirx.Expr | int, attrs: Attrs
) -> relax.Expr:
    """Return the scores that a mask of the keys adds: ``mask_filter_value`` where it is 0.

    The mask is (batch, keys), (batch, queries, keys), or has the number of the keys of each
    sequence.
    """
    dtype, rank = _dtype(data), _rank(mask)
    if rank == 1:
        if not Extents().equal(_extents(mask)[0], _extents(data)[0]):
            raise Refused(
                "its mask holds starts and ends of sequences; export the mask of all keys, of "
                "shape (batch, keys)"
            )
        lengths = bb.emit(op.expand_dims(mask, 1))
        places = bb.emit(op.expand_dims(_steps(bb, steps, _dtype(mask)), 0))
        kept = bb.emit(op.less(places, lengths))
        rank = 2
    elif rank in (2, 3):
        kept = bb.emit(op.greater(mask, relax.const(0, _dtype(mask))))
    else:
        raise Refused("its mask has 4 axes; export the mask of all keys, of shape (batch, keys)")
    value = relax.const(attrs.get("mask_filter_value", -10000.0), dtype)
    bias = bb.emit(op.where(kept, relax.const(0, dtype), value))
    return bb.emit(op.expand_dims(bias, [1, 2] if rank == 2 else [1]))


@_converts("Attention")
def _attention(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Attention with the products of queries, keys and values in one weight."""
    data, weights, bias, mask, _, extra = (inputs[i] for i in range(6))
    _without(inputs, attrs, {4: "past", 6: "past_sequence_length"}, ("do_rotary",))
    _only_output(attrs)
    heads, width = attrs["num_heads"], _extents(weights)[1]
    sizes = list(attrs.get("qkv_hidden_sizes", [])) or [width // 3] * 3
    product = bb.emit(op.matmul(data, weights))
    if bias is not None:
        product = bb.emit(op.add(product, bias))
    parts = _split(bb, product, [sizes[0], sizes[0] + sizes[1]], 2)
    projected = _Heads(*(_in_heads(bb, part, heads) for part in parts))
    steps = _extents(data)[1]
    biases = [] if mask is None else [_mask_bias(bb, mask, data, steps, attrs)]
    biases += [] if extra is None else [extra]
    excluded = [_unseen(bb, steps, steps)] if attrs.get("unidirectional", 0) else []
    return _attended(bb, projected, attrs, biases, excluded)


@_converts("MultiHeadAttention")
def _multi_head_attention(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Attention of queries, keys and values, which may be packed in one tensor, with a bias of all
    three."""
    query, key, value, bias, mask, extra = (inputs[i] for i in range(6))
    _without(
        inputs,
        attrs,
        {6: "past_key", 7: "past_value", 8: "past_sequence_length", 9: "cache_indirection"},
    )
    _only_output(attrs)
    heads = attrs["num_heads"]
    if _rank(query) == 5:  # (batch, steps, heads, 3, size)
        query, key, value = (
            bb.emit(op.permute_dims(bb.emit(op.squeeze(part, [3])), [0, 2, 1, 3]))
            for part in _split(bb, query, 3, 3)
        )
    elif key is None:
        raise Refused("it has no keys; export it with queries, keys and values")
    elif _rank(key) == 5:
        key, value = (
            bb.emit(op.permute_dims(bb.emit(op.squeeze(part, [3])), [0, 2, 1, 3]))
            for part in _split(bb, key, 2, 3)
        )
    elif value is None:
        raise Refused("it has no values; export it with queries, keys and values")
    if bias is not None:
        operands = [query, key, value]
        widths = [
            _extents(operand)[2]
            if _rank(operand) == 3
            else _extents(operand)[1] * _extents(operand)[3]
            for operand in operands
        ]
        parts = _split(bb, bias, [widths[0], widths[0] + widths[1]], 0)
        operands = [
            _with_bias(bb, operand, part) for operand, part in zip(operands, parts, strict=True)
        ]
        query, key, value = operands
    projected = _Heads(*(_in_heads(bb, operand, heads) for operand in (query, key, value)))
    queries, keys = _extents(projected.query)[2], _extents(projected.key)[2]
    biases = [] if mask is None else [_mask_bias(bb, mask, projected.query, keys, attrs)]
    biases += [] if extra is None else [extra]
    excluded = [_unseen(bb, queries, keys)] if attrs.get("unidirectional", 0) else []
    return _attended(bb, projected, attrs, biases, excluded)


def _with_bias(bb: Builder, data: relax.Expr, bias: relax.Expr | None) -> relax.Expr:
    if _rank(data) == 4:
        _, heads, _, size = _extents(data)
        bias = bb.emit(op.reshape(bias, [heads, 1, size]))
    return bb.emit(op.add(data, bias))


@_converts("GroupQueryAttention")
def _group_query_attention(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Causal attention in which several heads of queries share one of keys and values."""
    query, key, value = inputs[:3]
    _without(
        inputs,
        attrs,
        {3: "past_key", 4: "past_value", 11: "head_sink", 12: "k_scale", 13: "v_scale",
            14: "q_norm_weight", 15: "k_norm_weight", 16: "query_seqlens"},
        ("smooth_softmax", "kv_cache_bit_width", "qk_output", "sliding_window_cache"),
    )  # fmt: skip
    _only_output(attrs)
    heads, groups = attrs["num_heads"], attrs["kv_num_heads"]
    if key is None:
        size = _extents(query)[2] // (heads + 2 * groups)
        places = [heads * size, (heads + groups) * size]
        query, key, value = _split(bb, query, places, 2)
    batch, steps, _ = _extents(query)
    if attrs.get("do_rotary", 0):
        query, key = (
            _turned(bb, operand, inputs, attrs, count, opset=opset)
            for operand, count in ((query, heads), (key, groups))
        )
    query = _in_heads(bb, query, heads)
    key, value = (
        bb.emit(op.repeat(_in_heads(bb, operand, groups), heads // groups, 1))
        if heads > groups
        else _in_heads(bb, operand, groups)
        for operand in (key, value)
    )
    excluded = []
    if attrs.get("causal", 1):
        excluded.append(_unseen(bb, steps, steps, attrs.get("local_window_size", -1)))
    last = inputs[5]
    if last is not None:  # the place of the last key of each sequence
        last = bb.emit(op.reshape(last, [batch, 1, 1, 1]))
        places = bb.emit(op.reshape(_steps(bb, steps, _dtype(last)), [1, 1, 1, steps]))
        excluded.append(bb.emit(op.greater(places, last)))
    biases = [] if inputs[10] is None else [inputs[10]]
    return _attended(bb, _Heads(query, key, value), attrs, biases, excluded)


def _turned(
    bb: Builder, data: relax.Expr, inputs: Inputs, attrs: Attrs, heads: int, opset: int
) -> relax.Expr:
    """Return queries or keys with the rotary embedding of their places."""
    batch, steps, _ = _extents(data)
    places = inputs[9]
    if places is None:
        places = bb.emit(op.expand_dims(_steps(bb, steps), 0))
        places = bb.emit(op.broadcast_to(places, [batch, steps]))
    width = 2 * _extents(inputs[7])[1]
    settings = {
        "interleaved": attrs.get("rotary_interleaved", 0),
        "num_heads": heads,
        "rotary_embedding_dim": width,
        "tvm_custom": attrs["tvm_custom"],
    }
    operands = [data, places, inputs[7], inputs[8]]
    return bb.emit(FUSED["RotaryEmbedding"](bb, operands, settings, opset))


@_converts("EmbedLayerNormalization")
def _embed_layer_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the normalised sum of rows of words, places and segments; the number of words; and the
    sum."""
    words, segments, table, places, kinds, gamma, beta, mask, position = (
        inputs[i] for i in range(9)
    )
    batch, steps = _extents(words)
    if position is None:
        position = bb.emit(op.expand_dims(_steps(bb, steps), 0))
    total = bb.emit(op.take(table, words, 0, "nan"))
    total = bb.emit(op.add(total, bb.emit(op.take(places, position, 0, "nan"))))
    if segments is not None:
        total = bb.emit(op.add(total, bb.emit(op.take(kinds, segments, 0, "nan"))))
    result = bb.emit(op.nn.layer_norm(total, gamma, beta, [-1], attrs.get("epsilon", 1e-12)))
    if mask is None:
        count = bb.emit(op.zeros(relax.ShapeExpr([batch]), "int32"))
    else:
        count = bb.emit(op.sum(mask, [1]))
    outputs = attrs["tvm_custom"]["num_outputs"]
    return result if outputs == 1 else relax.Tuple([result, count, total][:outputs])


# Further operators that the optimizer writes


@_converts("BiasSoftmax")
def _bias_softmax(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the softmax of the sum of the data and a bias over the axes from ``axis`` on."""
    data, bias = inputs[:2]
    axis = attrs.get("axis", 1) % _rank(data)
    if not attrs.get("is_inner_broadcast", 1) and _extents(bias) != _extents(data):
        raise Refused(
            "its attribute is_inner_broadcast is 0, and its bias has other extents than its data: "
            f"{_extents(bias)} and {_extents(data)}; optimise the model without this fusion"
        )
    total = bb.emit(op.add(data, bias))
    extents = _extents(data)
    if axis == len(extents) - 1:
        return op.nn.softmax(total, -1)
    total = bb.emit(op.reshape(total, [*extents[:axis], math.prod(extents[axis:])]))
    return op.reshape(bb.emit(op.nn.softmax(total, -1)), extents)


@_converts("GemmFastGelu")
def _gemm_fast_gelu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    product = bb.emit(op.matmul(inputs[0], inputs[1]))
    if inputs[2] is not None:
        product = bb.emit(op.add(product, inputs[2]))
    return op.nn.gelu_tanh(product)


@_converts("BiasAdd")
def _bias_add(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return op.add(bb.emit(op.add(inputs[0], inputs[1])), inputs[2])


@_converts("BiasSplitGelu")
def _bias_split_gelu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return one half of the biased data times the GELU of the other."""
    scaled, gate = _split(bb, bb.emit(op.add(inputs[0], inputs[1])), 2, _rank(inputs[0]) - 1)
    return op.multiply(scaled, bb.emit(op.nn.gelu(gate)))


@_converts("TransposeMatMul")
def _transpose_matmul(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return FUSED["FusedMatMul"](bb, inputs, attrs, opset)
