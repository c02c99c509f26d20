"""Converters of operators that select elements."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op
from tvm.relax.frontend.onnx import onnx_frontend

from ...ir.compat import constant_value
from ._converters import _converts, _dtype, _extents, _is_tensor, _rank


@_converts("Gather")
def _gather(bb, inputs, attrs, opset):
    """Rows behind a table are NaN, where TVM's converter reads behind it: the places may be those of symbolic steps."""
    data = inputs[0]
    if not _is_tensor(data) or not _is_tensor(inputs[1]) or "float" not in _dtype(data):
        return None
    convert = onnx_frontend._get_convert_map()["Gather"].get_converter(opset)
    found = convert(bb, inputs, attrs, [{}, {}])
    if not isinstance(found, relax.Call) or found.op.name != "relax.take":
        return found
    return op.take(*found.args[:2], int(found.attrs.axis), "nan")


@_converts("Compress")
def _compress(bb, inputs, attrs, opset):
    """A constant condition selects elements at known places. TVM finds the places of others at run time."""
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
def _reverse_sequence(bb, inputs, attrs, opset):
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
