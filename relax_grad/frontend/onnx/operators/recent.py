"""Operators of ONNX's versions from 24 on, which TVM has none of."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.relax import op

from ..extents.values import is_symbolic
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Refused,
    Result,
    _constant,
    _converts,
    _dtype,
    _extents,
    _like,
    _rank,
    _text,
)


@_converts("Swish")
def _swish(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``x sigmoid(alpha x)``."""
    return swish_of(bb, inputs[0], attrs.get("alpha", 1.0))


@_converts("SwiGLU")
def _swiglu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``swish(a) b``."""
    gate = bb.emit(swish_of(bb, inputs[0], attrs.get("alpha", 1.0)))
    return op.multiply(gate, inputs[1])


def swish_of(bb: Builder, data: relax.Expr, alpha: float) -> relax.Expr:
    """Return ``x sigmoid(alpha x)``."""
    if alpha == 1.0:
        return op.nn.silu(data)
    scaled = bb.emit(op.multiply(data, _like(alpha, data)))
    return op.multiply(data, bb.emit(op.sigmoid(scaled)))


@_converts("CumProd")
def _cumprod(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    axis = int(_constant(inputs[1], "axis").item())
    data, backwards = inputs[0], attrs.get("reverse", 0)
    if backwards:
        data = bb.emit(op.flip(data, axis))
    product = op.cumprod(data, axis, exclusive=bool(attrs.get("exclusive", 0)))
    return op.flip(bb.emit(product), axis) if backwards else product


@_converts("TensorScatter")
def _tensor_scatter(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return a cache whose positions from the index of a sequence on come from the update."""
    cache, update, starts = inputs[0], inputs[1], inputs[2]
    rank, mode = _rank(cache), _text(attrs, "mode", "linear")
    if mode not in ("linear", "circular"):
        raise Refused(f"its attribute mode is {mode!r}; it must be 'linear' or 'circular'")
    axis = attrs.get("axis", -2)
    if not -rank <= axis < rank or axis % rank == 0:
        raise Refused(
            f"its attribute axis is {axis}; it must be an axis of the {rank} axes of the cache "
            "after the first one"
        )
    axis %= rank
    length, count = _extents(cache)[axis], _extents(update)[axis]
    column = [1] * rank
    column[axis] = length
    places = bb.emit(op.arange(0, length, 1, "int64"))
    places = bb.emit(op.reshape(places, relax.ShapeExpr(column)))
    if starts is not None:
        if _dtype(starts) != "int64":
            starts = bb.emit(op.astype(starts, "int64"))
        starts = bb.emit(op.expand_dims(starts, list(range(1, rank))))
        places = bb.emit(op.subtract(places, starts))
    if mode == "circular":
        places = bb.emit(op.floor_mod(places, number_of(bb, length)))
    zero = _like(0, places)
    is_new = op.logical_and(
        bb.emit(op.greater_equal(places, zero)), bb.emit(op.less(places, number_of(bb, count)))
    )
    is_new = bb.emit(is_new)
    places = bb.emit(op.where(is_new, places, zero))
    places = bb.emit(op.broadcast_to(places, relax.ShapeExpr(_extents(cache))))
    return op.where(is_new, bb.emit(op.gather_elements(update, places, axis)), cache)


def number_of(bb: Builder, extent: tirx.Expr | int) -> relax.Expr:
    """Return an extent as a tensor without axes."""
    if not is_symbolic(extent):
        return relax.const(int(extent), "int64")
    return bb.emit(op.sum(bb.emit(op.ones(relax.ShapeExpr([extent]), "int64"))))


@_converts("CausalConvWithState")
def _causal_conv(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return the convolution of each channel with the elements before, and the last elements, which
    are the state of the next call."""
    results = causal_convolution(bb, inputs[0], inputs[1], inputs[2], inputs[3], attrs=attrs)
    return results[0] if len(results) == 1 else relax.Tuple(results)


def causal_convolution(
    bb: Builder,
    data: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr | None,
    state: relax.Expr | None,
    attrs: Attrs,
    dilation: int = 1,
) -> list:
    """Return the convolution of each channel, and the state if it is a result."""
    activation = _text(attrs, "activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise Refused(
            f"its attribute activation is {activation!r}; it must be 'none', 'silu' or 'swish'"
        )
    (batch, channels, length), width = _extents(data), _extents(weight)[2]
    if is_symbolic(width) or is_symbolic(channels):
        raise Refused(
            f"its weight has the extents {_extents(weight)}; give the extents of the channels "
            "and of the window: shapes={...}"
        )
    kept = (int(width) - 1) * dilation
    if state is None:
        state = bb.emit(op.zeros(relax.ShapeExpr([batch, channels, kept]), _dtype(data)))
    whole = bb.emit(op.concat([state, data], 2)) if kept else data
    result = bb.emit(op.nn.conv1d(whole, weight, dilation=dilation, groups=int(channels)))
    if bias is not None:
        result = bb.emit(op.add(result, bb.emit(op.expand_dims(bias, 1))))
    if activation != "none":
        result = bb.emit(op.nn.silu(result))
    if attrs["tvm_custom"]["num_outputs"] < 2:
        return [result]
    if kept:
        last = op.add(bb.emit(op.arange(0, kept, 1, "int64")), number_of(bb, length))
        state = bb.emit(op.take(whole, bb.emit(last), 2, "clip"))
    return [result, state]
