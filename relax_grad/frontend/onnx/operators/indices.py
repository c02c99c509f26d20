"""Converters of operators that select elements."""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from ....ir.compat import constant_value
from ..extents.values import Known, objects
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Result,
    _constant,
    _converts,
    _dtype,
    _extents,
    _is_tensor,
    _rank,
)
from .symbolic import elements_of, tensor_of


@_converts("Gather")
def _gather(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Negative places count from the end. Rows after the end of a table are NaN: the places may
    come from symbolic steps."""
    data, places = inputs[:2]
    if not _is_tensor(data) or not _is_tensor(places) or "float" not in _dtype(data):
        return None
    if not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    axis = attrs.get("axis", 0) % _rank(data)
    extent, dtype, known = _extents(data)[axis], _dtype(places), constant_value(places)
    if known is None or (known < 0).any():
        # An extent that is a number is a constant here, by which the ranges of inputs are known.
        whole = tensor_of(bb, Known(objects([extent], ()), dtype))
        is_negative = bb.emit(op.less(places, relax.const(0, dtype)))
        places = bb.emit(op.where(is_negative, bb.emit(op.add(places, whole)), places))
    return op.take(data, places, axis, "nan")


@_converts("Compress")
def _compress(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """A constant condition selects elements at known places. TVM finds the places of others at run
    time."""
    data, condition = inputs[:2]
    chosen = constant_value(condition)
    if chosen is None:
        return None
    places = relax.const(np.flatnonzero(chosen), "int64")
    axis = attrs.get("axis")
    if axis is None:
        data, axis = bb.emit(op.reshape(data, [-1])), 0
    return op.take(data, places, axis)


@_converts("ReverseSequence")
def _reverse_sequence(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Reverse the first elements of each sequence, by its length, and keep the rest."""
    data, lengths = inputs[:2]
    time, batch = attrs.get("time_axis", 0), attrs.get("batch_axis", 1)
    steps, count = _extents(data)[time], _extents(data)[batch]
    places = bb.emit(op.arange(0, steps, 1, "int64"))
    lengths = lengths if _dtype(lengths) == "int64" else bb.emit(op.astype(lengths, "int64"))
    shape = [1] * _rank(data)
    shape[time] = steps
    places = bb.emit(op.reshape(places, shape))
    shape = [1] * _rank(data)
    shape[batch] = count
    lengths = bb.emit(op.reshape(lengths, shape))
    mirrored = bb.emit(op.subtract(op.subtract(lengths, places), relax.const(1, "int64")))
    sources = bb.emit(op.where(op.less(places, lengths), mirrored, places))
    sources = bb.emit(op.broadcast_to(sources, relax.ShapeExpr(_extents(data))))
    return op.gather_elements(data, sources, time)


def with_extent(bb: Builder, data: relax.Expr, axis: int, extent: tirx.Expr | int) -> relax.Expr:
    """Return floating-point data whose extent of an axis is another one, and NaN if it is not.

    TVM cannot compile a ``match_cast`` of extents of the same symbol.
    """
    axis %= _rank(data)
    own, wanted = (
        tensor_of(bb, Known(objects([number], ()), "int64"))
        for number in (_extents(data)[axis], extent)
    )
    places = bb.emit(op.arange(0, extent, 1, "int64"))
    behind = bb.emit(op.add(places, own))
    places = bb.emit(op.where(bb.emit(op.equal(own, wanted)), places, behind))
    return bb.emit(op.take(data, places, axis, "nan"))


@_converts("Unsqueeze")
def _unsqueeze(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """TVM's converter takes axes in a list only; the definitions of operators have a number."""
    axes = constant_value(inputs[1]) if opset >= 13 and _is_tensor(inputs[1]) else None
    if axes is not None and axes.ndim == 0:
        inputs[1] = relax.const(axes.reshape(1), "int64")
    return None


@_converts("OneHot")
def _one_hot(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Places beyond the axis have no element; the values have a gradient."""
    places, values = inputs[0], inputs[2]
    known = elements_of(inputs, attrs, 1)
    is_extent = known is not None and known.is_symbolic
    depth = (
        known.elements.item()
        if known is not None and is_extent
        else int(_constant(inputs[1], "depth").item())
    )
    rank = _rank(places) + 1
    axis = attrs.get("axis", -1) % rank
    places = bb.emit(op.expand_dims(bb.emit(op.astype(places, "int64")), axis))
    column = bb.emit(op.arange(0, depth, 1, "int64"))
    column = bb.emit(op.reshape(column, [depth if i == axis else 1 for i in range(rank)]))
    length = tensor_of(bb, Known(objects([depth], ()), "int64"))
    is_negative = bb.emit(op.less(places, relax.const(0, "int64")))
    places = bb.emit(op.where(is_negative, bb.emit(op.add(places, length)), places))
    off, on = (bb.emit(op.take(values, relax.const(i, "int64"), 0, "clip")) for i in (0, 1))
    return op.where(bb.emit(op.equal(places, column)), on, off)
