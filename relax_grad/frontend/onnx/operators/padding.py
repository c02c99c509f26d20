"""The converter of padding, whose widths may be computed extents."""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx
from tvm.relax import op

from ..extents.values import Extents, Known, is_symbolic, objects
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
    _rank,
    _text,
)
from .symbolic import arithmetic, elements_of, tensor_of

#: The modes of Relax's operator.
_MODES = {"constant": "constant", "edge": "replicate", "reflect": "reflect", "wrap": "circular"}


@_converts("Pad")
def _pad(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Relax's operator takes numbers as widths. Other axes are padded by blocks of a value, or by
    the places of the elements."""
    data = inputs[0]
    rank = _rank(data)
    axes = range(rank)
    if opset < 11:
        widths: Any
        widths, value = attrs.get("pads", attrs.get("paddings")), attrs.get("value", 0.0)
    else:
        known = elements_of(inputs, attrs, 1)
        widths = list((_constant(inputs[1], "widths") if known is None else known.elements).flat)
        value = 0.0 if inputs[2] is None else _constant(inputs[2], "value").item()
        if inputs[3] is not None:
            axes = _constant(inputs[3], "axes").tolist()
    count, mode = len(widths) // 2, _text(attrs, "mode", "constant")
    before, after, computed = [0] * rank, [0] * rank, {}
    for axis, low, high in zip(axes, widths[:count], widths[count:], strict=True):
        if is_symbolic(low) or is_symbolic(high):
            computed[axis % rank] = low, high
        else:
            before[axis % rank], after[axis % rank] = int(low), int(high)
    data = _by_numbers(bb, data, before, after, mode, value=value)
    for axis, (low, high) in computed.items():
        data = _by_extents(
            bb, data, arithmetic(attrs), axis, low, after=high, mode=mode, value=value
        )
    return data


def _by_numbers(
    bb: Builder, data: relax.Expr, before: list[int], after: list[int], mode: str, value: float
) -> relax.Expr:
    """Negative widths remove elements."""
    cut = [i for i in range(len(before)) if min(before[i], after[i]) < 0]
    if cut:
        extents = _extents(data)
        starts = [max(-before[i], 0) for i in cut]
        ends = [extents[i] - max(-after[i], 0) for i in cut]
        data = bb.normalize(op.strided_slice(data, cut, starts, ends, [1] * len(cut)))
        before, after = [max(width, 0) for width in before], [max(width, 0) for width in after]
    if not any(before) and not any(after):
        return data
    widths = [width for pair in zip(before, after, strict=True) for width in pair]
    return bb.normalize(op.nn.pad(data, widths, _MODES[mode], value))


def _by_extents(
    bb: Builder,
    data: relax.Expr,
    extents: Extents,
    axis: int,
    before: tirx.Expr | int,
    after: tirx.Expr | int,
    mode: str,
    value: float,
) -> relax.Expr:
    """Pad an axis by computed extents."""
    extent, dtype = _extents(data)[axis], _dtype(data)
    are_positive = extents.proves(before >= 0) and extents.proves(after >= 0)
    if mode == "constant" and are_positive:
        parts, filling = [data], relax.const(value, dtype)
        for width, place in ((after, 1), (before, 0)):
            if is_symbolic(width) or width:
                shape = [width if i == axis else size for i, size in enumerate(_extents(data))]
                parts.insert(place, bb.emit(op.full(relax.ShapeExpr(shape), filling, dtype)))
        return bb.emit(op.concat(parts, axis)) if len(parts) > 1 else data
    if mode != "constant" and not are_positive:
        raise Refused(
            f"its widths {before} and {after} of the axis {axis} may be negative, which the mode "
            f"{mode} does not take; give the extents of the inputs: shapes={{...}}"
        )
    total = extents.add(extents.add(before, extent), after)
    places = bb.emit(op.arange(0, total, 1, "int64"))
    places = bb.emit(op.subtract(places, _number(bb, before)))
    if mode == "edge":
        return bb.emit(op.take(data, places, axis, "clip"))
    whole, zero = _number(bb, extent), relax.const(0, "int64")
    if mode == "constant":
        taken = bb.emit(op.take(data, places, axis, "clip"))
        is_behind, is_ahead = (
            bb.emit(mask) for mask in (op.less(places, zero), op.greater_equal(places, whole))
        )
        kept = bb.emit(op.logical_not(bb.emit(op.logical_or(is_behind, is_ahead))))
        kept = bb.emit(op.reshape(kept, [-1 if i == axis else 1 for i in range(_rank(data))]))
        return bb.emit(op.where(kept, taken, relax.const(value, dtype)))
    if mode == "wrap":
        return bb.emit(op.take(data, bb.emit(op.floor_mod(places, whole)), axis, "clip"))
    # A reflection has twice the period of the distance between the first and the last element,
    # which one element has not.
    last = extents.add(extent, -1)
    period = _number(bb, extents.multiply(last, 2))
    places = bb.emit(op.floor_mod(places, bb.emit(op.maximum(period, relax.const(1, "int64")))))
    places = bb.emit(op.minimum(places, bb.emit(op.subtract(period, places))))
    return bb.emit(op.take(data, places, axis, "clip"))


def _number(bb: Builder, value: tirx.Expr | int) -> relax.Expr:
    """Return an extent as a tensor of one element."""
    return tensor_of(bb, Known(objects([value], (1,)), "int64"))
