"""Converters of operators that compare elements, in which NaN stays, as in PyTorch.

Relax's ``relu``, ``clip``, ``maximum``, ``minimum``, ``sign`` and reductions drop NaN, which marks
rows after the end of a table and extents that are not equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.frontend.onnx import onnx_frontend

from ....ir.compat import constant_value
from ....ir.dtypes import HALVES
from ....op import stop_gradient
from ...extremes import exact_extreme, is_nan, log_sum_exp, place_of_extreme
from .converters import (
    CONVERTERS,
    Attrs,
    Builder,
    Converter,
    Inputs,
    Refused,
    Result,
    _constant,
    _converts,
    _dtype,
    _extents,
    _is_float,
    _is_tensor,
    _like,
    _pairwise,
    _rank,
)
from .integers import bools_as_integers

#: The largest finite number of float32: the default bound of the first versions of Clip.
_MOST = float(np.finfo("float32").max)


def rectified(bb: Builder, data: relax.Expr) -> relax.Expr:
    """Return ``max(x, 0)``, in the form that the kernels of the pipeline compute too."""
    zero = _like(0, data)
    if not _is_float(data):
        return op.maximum(data, zero)
    return op.where(bb.emit(op.less_equal(data, zero)), zero, data)


def clipped(
    bb: Builder, data: relax.Expr, low: relax.Expr | None, high: relax.Expr | None = None
) -> relax.Expr:
    """Return ``min(max(x, low), high)``; the bounds pass the gradient."""
    for bound, is_beyond, limit in ((low, op.less, op.maximum), (high, op.greater, op.minimum)):
        if bound is None:
            continue
        if _is_float(data):
            data = bb.emit(op.where(bb.emit(is_beyond(data, bound)), bound, data))
        else:
            data = bb.emit(limit(data, bound))
    return data


@_converts("Relu")
def _relu(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return rectified(bb, inputs[0]) if _is_tensor(inputs[0]) else None


@_converts("Clip")
def _clip(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """A NaN bound has no effect."""
    data = inputs[0]
    if opset < 11:
        # These versions bound infinities, too.
        bounds = [attrs.get("min", -_MOST), attrs.get("max", _MOST)]
    else:
        bounds = [inputs[1], inputs[2]]
        for i, bound in enumerate(bounds):
            value = None if bound is None else constant_value(bound)
            if value is not None:
                bounds[i] = value.item()
    low, high = (None if isinstance(b, float) and math.isnan(b) else b for b in bounds)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        low = min(low, high)
    low, high = (_like(b, data) if isinstance(b, (int, float)) else b for b in (low, high))
    return clipped(bb, data, low, high)


@_converts("HardSigmoid")
def _hard_sigmoid(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data = inputs[0]
    line = op.multiply(_like(float(attrs.get("alpha", 0.2)), data), data)
    line = bb.emit(op.add(line, _like(float(attrs.get("beta", 0.5)), data)))
    return clipped(bb, line, _like(0, data), _like(1, data))


@_converts("Sign")
def _sign(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data = inputs[0]
    if not _is_float(data):
        return None
    data = bb.emit(stop_gradient(data))
    zero, one = _like(0, data), _like(1, data)
    rest = bb.emit(op.where(bb.emit(op.less(data, zero)), _like(-1, data), data))
    return op.where(bb.emit(op.greater(data, zero)), one, rest)


def _of_two(function: Callable, bb: Builder, first: relax.Expr, second: relax.Expr) -> relax.Expr:
    """Return the extreme of two operands; Relax's is the second of two that have no order."""
    if not _is_float(first):
        return function(first, second)
    if constant_value(second) is not None:
        first, second = second, first
    result = function(first, second)
    constant = constant_value(first)
    if constant is not None and (constant == constant).all():
        return result
    fixed = bb.emit(stop_gradient(first))
    wrong = bb.emit(op.where(is_nan(bb.emit, fixed), fixed, _like(0, first)))
    return op.add(bb.normalize(result), wrong)


CONVERTERS["Max"] = _pairwise(partial(_of_two, op.maximum))
CONVERTERS["Min"] = _pairwise(partial(_of_two, op.minimum))


def _reduction(name: str) -> Converter:
    largest = name != "ReduceMin"

    def convert(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
        data = inputs[0]
        if name == "GlobalMaxPool":
            _require_some(attrs, _extents(data)[2:])
        if _is_tensor(data) and _dtype(data) == "bool":
            return bools_as_integers(name)(bb, inputs, attrs, opset)
        converter = onnx_frontend._get_convert_map()[name].get_converter(opset)
        call = converter(bb, inputs, dict(attrs), [{}, {}])
        if not _is_tensor(data) or not _is_float(data) or not isinstance(call, relax.Call):
            return call
        axes, keepdims = call.attrs.axis, bool(call.attrs.keepdims)
        axes = None if axes is None else [int(axis) for axis in axes]
        result = bb.normalize(call)
        return exact_extreme(bb.emit, data, result, lambda v: op.sum(v, axes, keepdims), largest)

    return convert


for _name in ("ReduceMax", "ReduceMin", "GlobalMaxPool"):
    CONVERTERS[_name] = _reduction(_name)


@_converts("ReduceLogSumExp")
def _log_sum_exp(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """An axis of equal infinities has its own value; half precision is computed in float32."""
    data = inputs[0]
    if not _is_tensor(data) or not _is_float(data):
        return None
    if opset < 18:
        axes = attrs.get("axes")
    else:
        given = _constant(inputs[1] if len(inputs) > 1 else None, "axes")
        axes = [] if given is None else given.ravel().tolist()
        if not axes and attrs.get("noop_with_empty_axes", 0):
            return data
    axes = [int(axis) for axis in axes] if axes else None
    is_half = _dtype(data) in HALVES
    wide = bb.emit(op.astype(data, "float32")) if is_half else data
    result = log_sum_exp(bb.emit, wide, axes)
    if not attrs.get("keepdims", 1):
        result = bb.emit(op.squeeze(result, axes))
    return op.astype(result, _dtype(data)) if is_half else result


def _require_some(attrs: Attrs, extents: list) -> None:
    """Require that axes have elements."""
    for extent in extents:
        reason = f"it takes an extreme of an axis of {extent} elements"
        if isinstance(extent, int):
            if not extent:
                raise Refused(reason)
        elif not isinstance(extent, tirx.IntImm):
            attrs["tvm_custom"]["require"](extent >= 1, reason)


#: The functions of one element that reductions apply before and after the sum.
_OF_ELEMENTS: dict[str, Callable] = {
    "ReduceL1": op.abs,
    "ReduceL2": op.abs,
    "ReduceLogSum": op.log,
    "ReduceSumSquare": op.square,
}


def _of_elements(function: Callable) -> Converter:
    """Return a converter of a reduction over no axes, which TVM leaves out."""

    def convert(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
        if opset < 18 or not attrs.get("noop_with_empty_axes", 0):
            return None
        axes = _constant(inputs[1] if len(inputs) > 1 else None, "axes")
        return function(inputs[0]) if axes is None or not axes.size else None

    return convert


for _name, _function in _OF_ELEMENTS.items():
    CONVERTERS[_name] = _of_elements(_function)


@_converts("ArgMax")
def _argmax(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return _place(bb, inputs[0], attrs, True)


@_converts("ArgMin")
def _argmin(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    return _place(bb, inputs[0], attrs, False)


def _place(bb: Builder, data: relax.Expr, attrs: Attrs, largest: bool) -> relax.Expr | None:
    _require_some(attrs, [_extents(data)[attrs.get("axis", 0) % _rank(data)]])
    if not _is_float(data):
        return None
    axis, is_last = attrs.get("axis", 0) % _rank(data), attrs.get("select_last_index", 0)
    extent = _extents(data)[axis]
    if is_last and not isinstance(extent, int):
        raise Refused(
            f"it selects the last place of an axis of the extent {extent}; give the extents of the "
            "inputs: shapes={...}"
        )
    data = bb.emit(stop_gradient(data))
    if is_last:
        data = bb.emit(op.flip(data, axis))
    place = place_of_extreme(bb.emit, data, axis, largest)
    if is_last:
        place = bb.emit(op.subtract(relax.const(extent - 1, "int64"), place))
    return place if attrs.get("keepdims", 1) else op.squeeze(place, [axis])


@_converts("Hardmax")
def _hardmax(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """The first of several maxima is 1."""
    data = inputs[0]
    rank, shape = _rank(data), _extents(data)
    axis = attrs.get("axis", 1 if opset < 13 else -1) % rank
    if opset < 13 and axis < rank - 1:
        return None  # over all axes from this one on
    place = place_of_extreme(bb.emit, bb.emit(stop_gradient(data)), axis, True)
    places = bb.emit(op.arange(0, shape[axis], 1, "int64"))
    places = bb.emit(op.reshape(places, [-1 if i == axis else 1 for i in range(rank)]))
    return op.astype(bb.emit(op.equal(places, place)), _dtype(data))
