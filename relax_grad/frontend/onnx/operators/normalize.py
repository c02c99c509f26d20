"""Converters of normalisations."""

from __future__ import annotations

from tvm import relax

from .converters import (
    Attrs,
    Builder,
    Inputs,
    Refused,
    Result,
    _converts,
    _dtype,
    _extents,
    _like,
    _rank,
)


@_converts("BatchNormalization")
def _batch_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """ONNX's momentum is the share of the old statistics, TVM's the share of the new ones."""
    if not attrs.get("spatial", 1):
        raise Refused(
            "it normalises every element by itself (spatial=0); export it for version 9 or later"
        )
    attrs["momentum"] = 1.0 - attrs.get("momentum", 0.9)
    return None


@_converts("LayerNormalization")
def _layer_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data, scale, bias = inputs[0], inputs[1], inputs[2]
    rank = _rank(data)
    axis = attrs.get("axis", -1) % rank
    shape = _extents(data)[axis:]
    operands = []
    for operand in (scale, bias):
        if operand is None:
            operand = bb.normalize(relax.op.zeros(relax.ShapeExpr(shape), _dtype(scale)))
        elif _extents(operand) != shape:
            operand = bb.normalize(relax.op.broadcast_to(operand, shape))
        operands.append(operand)
    axes, epsilon = list(range(axis, rank)), attrs.get("epsilon", 1e-5)
    result = relax.op.nn.layer_norm(data, *operands, axes, epsilon)
    if attrs["tvm_custom"]["num_outputs"] < 2:
        return result
    if attrs.get("stash_type", 1) == 1:
        data = bb.normalize(relax.op.astype(data, "float32"))
    mean = bb.normalize(relax.op.mean(data, axes, keepdims=True))
    variance = bb.normalize(relax.op.variance(data, axes, keepdims=True))
    shifted = bb.normalize(relax.op.add(variance, _like(epsilon, variance)))
    inverse = bb.normalize(relax.op.divide(_like(1, shifted), relax.op.sqrt(shifted)))
    return relax.Tuple([bb.normalize(result), mean, inverse])


@_converts("LpNormalization")
def _lp_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``x / |x|`` by the 1-norm or the 2-norm along an axis, and 0 where the norm is 0."""
    data, axis, order = inputs[0], attrs.get("axis", -1), attrs.get("p", 2)
    if order not in (1, 2):
        raise Refused(f"its order p must be 1 or 2, but it is {order}")
    powers = relax.op.abs(data) if order == 1 else relax.op.multiply(data, data)
    total = bb.normalize(relax.op.sum(powers, [axis], keepdims=True))
    is_zero = bb.normalize(relax.op.equal(total, _like(0, data)))
    total = bb.normalize(relax.op.where(is_zero, _like(1, data), total))
    return relax.op.divide(data, total if order == 1 else relax.op.sqrt(total))


@_converts("LRN")
def _lrn(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Divide by a power of ``bias + alpha / size`` times the sum of the squares in a window of
    channels."""
    data, size = inputs[0], attrs["size"]
    before, after = (size - 1) // 2, size // 2
    widths = [0] * (2 * _rank(data))
    widths[2], widths[3] = before, after
    squares = bb.normalize(relax.op.nn.pad(relax.op.multiply(data, data), widths))
    channels, total = _extents(data)[1], None
    for start in range(size):
        end = channels + start
        part = bb.emit(relax.op.strided_slice(squares, [1], [start], [end], [1]))
        total = part if total is None else bb.emit(relax.op.add(total, part))
    scaled = relax.op.multiply(total, _like(attrs.get("alpha", 1e-4) / size, data))
    base = bb.emit(relax.op.add(scaled, _like(attrs.get("bias", 1.0), data)))
    return relax.op.divide(data, relax.op.power(base, _like(attrs.get("beta", 0.75), data)))


@_converts("MeanVarianceNormalization")
def _mean_variance(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return ``(x - mean) / (sqrt(variance) + 1e-9)``, as ONNX defines it."""
    data = inputs[0]
    axes = [axis % _rank(data) for axis in attrs.get("axes", (0, 2, 3))]
    mean = bb.emit(relax.op.mean(data, axes, keepdims=True))
    variance = bb.emit(relax.op.variance(data, axes, keepdims=True))
    root = bb.emit(relax.op.add(relax.op.sqrt(variance), _like(1e-9, data)))
    return relax.op.divide(relax.op.subtract(data, mean), root)


@_converts("GroupNormalization")
def _group_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Before version 21, the scale and the bias have an element for each group. Half precision is
    computed in float32."""
    data, dtype = inputs[0], _dtype(inputs[0])
    groups, rank, channels = attrs["num_groups"], _rank(inputs[0]), _extents(inputs[0])[1]
    if not isinstance(channels, int):
        raise Refused(f"the number of its channels is {channels}; give the extents: shapes={{...}}")
    is_half = "16" in dtype and attrs.get("stash_type", 1) == 1
    operands = []
    for operand in inputs[1:3]:
        if _extents(operand) != [channels]:
            column = bb.emit(relax.op.expand_dims(operand, 1))
            operand = bb.emit(relax.op.broadcast_to(column, (groups, channels // groups)))
            operand = bb.emit(relax.op.reshape(operand, (channels,)))
        operands.append(bb.emit(relax.op.astype(operand, "float32")) if is_half else operand)
    data = bb.emit(relax.op.astype(data, "float32")) if is_half else data
    epsilon, axes = attrs.get("epsilon", 1e-5), list(range(2, rank))
    result = relax.op.nn.group_norm(data, *operands, groups, 1, axes, epsilon)
    return relax.op.astype(bb.normalize(result), dtype) if is_half else result


@_converts("RMSNormalization")
def _rms_norm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Half precision is computed in float32, which Relax's operator does; float64 stays float64."""
    data, scale = inputs[:2]
    axes = list(range(attrs.get("axis", -1) % _rank(data), _rank(data)))
    shape = _extents(data)[axes[0] :]
    if _extents(scale) != shape:
        scale = bb.emit(relax.op.broadcast_to(scale, relax.ShapeExpr(shape)))
    return relax.op.nn.rms_norm(data, scale, axes, attrs.get("epsilon", 1e-5))
