"""ONNX's own operator ``Attention``, as one operator where it has no other result."""

from __future__ import annotations

import math

import onnx
from tvm import relax
from tvm.relax import op

from ._converters import Refused, _dtype, _extents, _rank
from ._graph import attribute
from ._values import Extents

#: The places of the operands and results.
_PAST, _NONPAD, _PRODUCTS = 4, 6, 3

#: The version from which on a mask may have fewer keys.
_SHORT_MASKS = 24

#: The largest precision of the softmax that the operator has.
_WIDE = onnx.TensorProto.DOUBLE

#: Attributes of windows, which only the definition by other operators has.
_WINDOWS = "left_window_size", "right_window_size"


def is_operator(node: onnx.NodeProto) -> bool:
    """Tell whether an ``Attention`` of ONNX's own domain is one operator of Relax.

    Others are imported by ONNX's definition: with a bound of the scores, with the scores as a
    result, and with a softmax in float64.
    """
    has_scores = len(node.output) > _PRODUCTS and bool(node.output[_PRODUCTS])
    has_lengths = len(node.input) > _NONPAD and bool(node.input[_NONPAD])
    if has_scores or has_lengths or attribute(node, "softmax_precision", 0) == _WIDE:
        return False
    return attribute(node, "softcap", 0.0) == 0 and all(
        attribute(node, name, -1) == -1 for name in _WINDOWS
    )


def _attention(bb, inputs, attrs, opset):
    """A query that may see no key has the result zero. The keys and values of the past stand before
    the others."""
    query, key, value, mask, past_key, past_value = (inputs[i] for i in range(6))
    is_flat = _rank(query) == 3
    heads, groups = attrs.get("q_num_heads", 0), attrs.get("kv_num_heads", 0)
    if is_flat and not (heads and groups):
        raise Refused("its operands have three axes, and it has no q_num_heads and kv_num_heads")
    query, key, value = (
        _by_positions(bb, operand, count)
        for operand, count in ((query, heads), (key, groups), (value, groups))
    )
    queries, new = _extents(query)[1], _extents(key)[1]
    if (past_key is None) != (past_value is None):
        raise Refused("it has past keys or past values without the others")
    if past_key is not None:
        key, value = (
            bb.emit(op.concat([_by_positions(bb, past, 0), operand], 1))
            for past, operand in ((past_key, key), (past_value, value))
        )
    kwargs = {"scale": attrs.get("scale", 1 / math.sqrt(_extents(query)[3]))}
    if attrs.get("is_causal", 0):
        # A query sees the past, and the keys up to its own.
        if past_key is not None and not Extents().equal(queries, new):
            raise Refused("it is causal with a past, and has other numbers of queries and new keys")
        kwargs["causal_mask"] = "TopLeft" if past_key is None else "BottomRight"
    if mask is None:
        result = bb.emit(op.nn.attention(query, key, value, **kwargs))
    else:
        bias = _bias(bb, mask, _dtype(query), _extents(key)[1], opset)
        result = bb.emit(op.nn.attention_bias(query, key, value, bias, **kwargs))
    if is_flat:
        batch, steps, count, width = _extents(result)
        result = op.reshape(result, [batch, steps, count * width])
    else:
        result = op.permute_dims(result, [0, 2, 1, 3])
    count = attrs["tvm_custom"]["num_outputs"]
    if count == 1:
        return result
    present = [bb.emit(op.permute_dims(operand, [0, 2, 1, 3])) for operand in (key, value)]
    return relax.Tuple([bb.emit(result), *present][:count])


def _by_positions(bb, data, heads: int) -> relax.Expr:
    """Return data as (batch, positions, heads, features)."""
    if _rank(data) == 4:
        return bb.emit(op.permute_dims(data, [0, 2, 1, 3]))
    batch, steps, width = _extents(data)
    return bb.emit(op.reshape(data, [batch, steps, heads, width // heads]))


def _bias(bb, mask, dtype: str, keys, opset: int) -> relax.Expr:
    """Return what a mask adds to the scores, with four axes and a number for each key.

    Keys behind the last of the mask are hidden. Before version 24, a mask of one key is one of all.
    """
    if _dtype(mask) == "bool":
        numbers = (relax.const(number, dtype) for number in (0.0, -math.inf))
        mask = bb.emit(op.where(mask, *numbers))
    missing = 4 - _rank(mask)
    if missing:
        mask = bb.emit(op.expand_dims(mask, list(range(missing))))
    *others, own = _extents(mask)
    if Extents().equal(own, keys):
        return mask
    if own == 1 and opset < _SHORT_MASKS:
        return bb.emit(op.broadcast_to(mask, [*others, keys]))
    if not (isinstance(own, int) and isinstance(keys, int) and own < keys):
        raise Refused(f"its mask has {own} keys, and it has {keys}")
    hidden = op.broadcast_to(relax.const(-math.inf, dtype), [*others, keys - own])
    return bb.emit(op.concat([mask, bb.emit(hidden)], 3))


#: The converter of ONNX's own attention.
STANDARD_ATTENTION = {"Attention": _attention}
