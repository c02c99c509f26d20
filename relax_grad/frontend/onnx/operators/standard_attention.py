"""ONNX's own operator ``Attention``: one operator of Relax, or written out where it has more than
this operator."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import onnx
from tvm import relax, tirx
from tvm.relax import op

from ..extents.values import Extents
from .converters import (
    Attrs,
    Builder,
    Converter,
    Inputs,
    Refused,
    Result,
    _dtype,
    _extents,
    _like,
    _rank,
)
from .recent import number_of

#: The version from which on a mask may have fewer keys.
_SHORT_MASKS = 24

#: The dtypes of the softmax, by their numbers in ONNX.
_PRECISIONS = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.BFLOAT16: "bfloat16",
}

#: The number of results with the scores.
_WITH_SCORES = 4


def _attention(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """A query that may see no key has the result zero. The keys and values of the past stand before
    the others.

    A bound of the scores, the scores as a result, and a softmax in float64 are written out.
    """
    query, key, value, mask, past_key, past_value, lengths = (inputs[i] for i in range(7))
    is_flat = _rank(query) == 3
    heads, groups = attrs.get("q_num_heads", 0), attrs.get("kv_num_heads", 0)
    if is_flat and not (heads and groups):
        raise Refused("its operands have three axes, and it has no q_num_heads and kv_num_heads")
    query, key, value = (
        _by_positions(bb, operand, count)
        for operand, count in ((query, heads), (key, groups), (value, groups))
    )
    if (past_key is None) != (past_value is None):
        raise Refused("it has past keys or past values without the others")
    if past_key is not None and lengths is not None:
        raise Refused(
            "it has nonpad_kv_seqlen and past keys; ONNX allows one of them: leave one out"
        )
    past = 0
    if past_key is not None:
        past = _extents(past_key)[2]
        key, value = (
            bb.emit(op.concat([_by_positions(bb, old, 0), operand], 1))
            for old, operand in ((past_key, key), (past_value, value))
        )
    settings = _Settings.of(attrs, _extents(query)[3])
    count = attrs["tvm_custom"]["num_outputs"]
    is_operator = settings.is_operator and count < _WITH_SCORES
    causal_mask = _causal_mask(settings, query, key, past, lengths) if is_operator else None
    seen = None
    if causal_mask is None:
        seen = _seen(bb, settings, query, key, past, lengths=lengths)
    bias = None if mask is None else _bias(bb, mask, _dtype(query), _extents(key)[1], opset)
    if seen is not None:
        hidden = (relax.const(number, _dtype(query)) for number in (0.0, -math.inf))
        seen = bb.emit(op.where(seen, *hidden))
        bias = seen if bias is None else bb.emit(op.add(bias, seen))
    scores = None
    if is_operator:
        kwargs = {"scale": settings.scale, "causal_mask": causal_mask}
        if bias is None:
            result = op.nn.attention(query, key, value, **kwargs)
        else:
            result = op.nn.attention_bias(query, key, value, bias, **kwargs)
        result = bb.emit(result)
    else:
        result, scores = _written_out(bb, settings, query, key, value, bias=bias)
    if is_flat:
        result = bb.emit(op.reshape(result, [*_extents(result)[:2], -1]))
    else:
        result = bb.emit(op.permute_dims(result, [0, 2, 1, 3]))
    if count == 1:
        return result
    present = [bb.emit(op.permute_dims(operand, [0, 2, 1, 3])) for operand in (key, value)]
    results = [result, *present]
    if scores is not None:
        results.append(scores)
    return relax.Tuple(results[:count])


class _Settings(NamedTuple):
    """The attributes of attention; a window of -1 is unbounded."""

    scale: float
    is_causal: bool
    left: int
    right: int
    bound: float
    precision: str | None
    mode: int

    @classmethod
    def of(cls, attrs: Attrs, width: int) -> _Settings:
        windows = []
        for side in ("left", "right"):
            name = f"{side}_window_size"
            windows.append(attrs.get(name, -1))
            if windows[-1] < -1:
                raise Refused(
                    f"its attribute {name} is {windows[-1]}; it is -1 without a window, and "
                    "otherwise a number of keys"
                )
        mode, bound = attrs.get("qk_matmul_output_mode", 0), attrs.get("softcap", 0.0)
        if mode not in range(4):
            raise Refused(f"its attribute qk_matmul_output_mode is {mode}; it must be 0, 1, 2 or 3")
        if bound < 0:
            raise Refused(f"its attribute softcap is {bound:g}; a bound is positive, and 0 is none")
        number = attrs.get("softmax_precision")
        if number is not None and number not in _PRECISIONS:
            known = ", ".join(f"{i} ({name})" for i, name in _PRECISIONS.items())
            raise Refused(f"its attribute softmax_precision is {number}; it must be one of {known}")
        precision = _PRECISIONS.get(number)
        scale = attrs.get("scale")
        if scale is None:
            if not isinstance(width, int):
                raise Refused(
                    "the size of its heads is symbolic; give the extents of the inputs: "
                    "shapes={...}"
                )
            scale = 1 / math.sqrt(width)
        left, right = windows
        return cls(
            scale,
            bool(attrs.get("is_causal", 0)),
            left,
            right=right,
            bound=bound,
            precision=precision,
            mode=mode,
        )

    @property
    def is_bounded(self) -> bool:
        """Whether a query sees a window."""
        return self.left >= 0 or self.right >= 0

    @property
    def is_operator(self) -> bool:
        """Whether Relax's operator has these settings; its softmax is in float32 at least."""
        return not self.bound and self.precision != "float64"


def _causal_mask(
    settings: _Settings,
    query: relax.Expr,
    key: relax.Expr,
    past: tirx.Expr | int,
    lengths: relax.Expr | None,
) -> str | None:
    """Return the causal mask of the operator; None if it has no such mask."""
    if not settings.is_causal or settings.is_bounded or lengths is not None:
        return None
    if isinstance(past, int) and past == 0:
        return "TopLeft"
    is_last = Extents().equal(_extents(query)[1] + past, _extents(key)[1])
    return "BottomRight" if is_last else None


def _seen(
    bb: Builder,
    settings: _Settings,
    query: relax.Expr,
    key: relax.Expr,
    past: tirx.Expr | int,
    lengths: relax.Expr | None,
) -> relax.Expr | None:
    """Return which keys a query sees, with four axes; None if it sees all.

    The position of a query is its number after the keys of the past, or among the last ones of
    those that are there.
    """
    if lengths is None and not settings.is_bounded and not settings.is_causal:
        return None
    steps = _extents(query)[1]
    places = bb.emit(op.arange(0, _extents(key)[1], 1, "int64"))
    positions = bb.emit(op.arange(0, steps, 1, "int64"))
    positions = bb.emit(op.reshape(positions, relax.ShapeExpr([1, 1, steps, 1])))
    if not isinstance(past, int) or past:
        positions = bb.emit(op.add(positions, number_of(bb, past)))
    conditions = []
    if lengths is not None:
        (count,), batch = _extents(lengths), _extents(query)[0]
        if not Extents().equal(count, batch):
            raise Refused(
                f"its nonpad_kv_seqlen has {count} numbers, and its batch is {batch}; give the "
                "inputs the same symbols or extents: shapes={...}"
            )
        if _dtype(lengths) != "int64":
            lengths = bb.emit(op.astype(lengths, "int64"))
        lengths = bb.emit(op.expand_dims(lengths, [1, 2, 3]))
        conditions.append(op.less(places, lengths))
        first = bb.emit(op.subtract(lengths, number_of(bb, steps)))
        positions = bb.emit(op.add(positions, first))
    if settings.is_causal:
        conditions.append(op.less_equal(places, positions))
    if settings.left >= 0:
        start = bb.emit(op.subtract(positions, _like(settings.left, positions)))
        conditions.append(op.greater_equal(places, start))
    if settings.right >= 0:
        end = bb.emit(op.add(positions, _like(settings.right, positions)))
        conditions.append(op.less_equal(places, end))
    conditions = [bb.emit(condition) for condition in conditions]
    return functools.reduce(lambda a, b: bb.emit(op.logical_and(a, b)), conditions)


def _written_out(
    bb: Builder,
    settings: _Settings,
    query: relax.Expr,
    key: relax.Expr,
    value: relax.Expr,
    bias: relax.Expr | None,
) -> tuple[relax.Expr, relax.Expr]:
    """Return the result by positions, and the scores of the mode."""
    dtype, heads, groups = _dtype(query), _extents(query)[2], _extents(key)[2]
    query, key, value = (
        bb.emit(op.permute_dims(operand, [0, 2, 1, 3])) for operand in (query, key, value)
    )
    if heads != groups:
        key, value = (bb.emit(op.repeat(x, heads // groups, 1)) for x in (key, value))
    # The factor of both operands avoids an overflow of the product in half precision.
    factor = math.sqrt(abs(settings.scale))
    query = bb.emit(op.multiply(query, _like(math.copysign(factor, settings.scale), query)))
    key = bb.emit(op.multiply(key, _like(factor, key)))
    product = bb.emit(op.matmul(query, bb.emit(op.permute_dims(key, [0, 1, 3, 2]))))
    bounded = product
    if settings.bound:
        bound = _like(settings.bound, product)
        curve = bb.emit(op.tanh(bb.emit(op.divide(product, bound))))
        bounded = bb.emit(op.multiply(curve, bound))
    total, biased = bounded, bounded
    is_empty = None
    if bias is not None:
        biased = bb.emit(op.add(bounded, bias))
        # TVM's maximum of nothing but -inf is the smallest finite number.
        seen = op.astype(op.greater(bias, _like(-math.inf, bias)), "float32")
        most = bb.emit(op.max(bb.emit(seen), -1, keepdims=True))
        is_empty = bb.emit(op.equal(most, _like(0, most)))
        # The softmax of such a row, and its gradient, would be NaN.
        total = bb.emit(op.add(bounded, bb.emit(op.where(is_empty, _like(0, bias), bias))))
    kind = settings.precision
    if kind is not None:
        total = bb.emit(op.astype(total, kind))
    weights = bb.emit(op.nn.softmax(total, -1))
    if is_empty is not None:
        weights = bb.emit(op.where(is_empty, _like(0, weights), weights))
    if kind is not None:
        weights = bb.emit(op.astype(weights, dtype))
    result = bb.emit(op.matmul(weights, value))
    scores = (product, bounded, biased, weights)[settings.mode]
    return bb.emit(op.permute_dims(result, [0, 2, 1, 3])), scores


def _by_positions(bb: Builder, data: relax.Expr, heads: int) -> relax.Expr:
    """Return data as (batch, positions, heads, features)."""
    if _rank(data) == 4:
        return bb.emit(op.permute_dims(data, [0, 2, 1, 3]))
    batch, steps, width = _extents(data)
    return bb.emit(op.reshape(data, [batch, steps, heads, width // heads]))


def _bias(
    bb: Builder, mask: relax.Expr, dtype: str, keys: tirx.Expr | int, opset: int
) -> relax.Expr:
    """Return what a mask adds to the scores, with four axes and a number for each key.

    Keys after the end of the mask are hidden. Before version 24, a mask of one key is one of all.
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
STANDARD_ATTENTION: dict[str, Converter] = {"Attention": _attention}
