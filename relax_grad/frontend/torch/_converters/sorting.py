"""Converters of operators that order elements or count them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, tirx

from ....op import stop_gradient
from ...extremes import is_nan, sort_key
from ._call import Call, axis_of, converts, dtype, extents_of, scalar, static, wide_dtype
from ._support import Converter, Refused
from .manipulate import sliced

SORTING: dict[str, Converter] = {}

_op = relax.op


def _order(call: Call, data: relax.Expr, axis: int, descending: bool) -> relax.Expr:
    data = call.cast(data, "int8") if dtype(data) == "bool" else data
    if "float" in dtype(data):
        # TVM's sort needs numbers that have an order, and sorts bfloat16 as integers.
        data = sort_key(call.emit, data)
    return call.emit(_op.argsort(data, axis, descending, "int64"))


def _taken(call: Call, data: relax.Expr, places: relax.Expr, axis: int) -> relax.Expr:
    kind = dtype(data)
    inner = call.cast(data, "int8") if kind == "bool" else data
    return call.cast(call.emit(_op.gather_elements(inner, places, axis)), kind)


@converts(SORTING, "sort.default", "sort.stable")
def _sort(
    call: Call,
    data: relax.Expr,
    dim: int = -1,
    descending: bool = False,
    stable: bool | None = None,
) -> tuple:
    if not data.ty.ndim:
        return data, _op.zeros([], "int64")
    axis = axis_of(dim, data.ty.ndim)
    places = _order(call, data, axis, descending)
    return _taken(call, data, places, axis), places


@converts(SORTING, "argsort.default", "argsort.stable")
def _argsort(
    call: Call,
    data: relax.Expr,
    dim: int = -1,
    descending: bool = False,
    stable: bool | None = None,
) -> relax.Expr:
    if not data.ty.ndim:
        return _op.zeros([], "int64")
    return _order(call, data, axis_of(dim, data.ty.ndim), descending)


@converts(SORTING, "topk.default")
def _topk(
    call: Call, data: relax.Expr, k: int | tirx.Expr, dim: int, largest: bool, sorted: bool
) -> tuple:
    if not data.ty.ndim:
        return data, _op.zeros([], "int64")
    axis = axis_of(dim, data.ty.ndim)
    places = sliced(call, _order(call, data, axis, largest), axis, 0, call.shape[axis])
    return _taken(call, data, places, axis), places


@converts(
    SORTING,
    *("median.default", "median.dim", "nanmedian.default", "nanmedian.dim", "kthvalue.default"),
)
def _kth(
    call: Call,
    data: relax.Expr,
    k: int | tirx.Expr | None = None,
    dim: Any = None,
    keepdim: bool = False,
) -> relax.Expr | tuple[relax.Expr, relax.Expr]:
    """The lower of two middle elements is the median."""
    name = call.node.target.__name__
    whole = name in ("median.default", "nanmedian.default")
    shape = call.shape
    if not data.ty.ndim:
        return data if whole else (data, _op.zeros([], "int64"))
    if whole:
        data, dim = call.reshape(data, [math.prod(extents_of(data))]), 0
    axis = axis_of(dim, data.ty.ndim)
    extent = extents_of(data)[axis]
    call.require_some([extent])
    middle = (extent - 1) // 2 if k is None else k - 1
    order = _order(call, data, axis, False)
    if name.startswith("nanmedian") and "float" in dtype(data):
        place = _middle_number(call, data, order, axis)
    else:
        place = sliced(call, order, axis, middle, 1)
    if name.startswith("median") and "float" in dtype(data):
        # NaN anywhere is the median.
        wrong = call.cast(call.emit(_op.isnan(call.cast(data, wide_dtype(dtype(data))))), "int8")
        some = call.cast(call.emit(_op.max(wrong, [axis], True)), "bool")
        place = call.emit(_op.where(some, _op.argmax(wrong, axis, True), place))
    value = call.reshape(_taken(call, data, place, axis), shape)
    if whole and "float" in dtype(data):
        value = _shared(call, data, value)
    return value if whole else (value, call.reshape(place, shape))


def _middle_number(call: Call, data: relax.Expr, order: relax.Expr, axis: int) -> relax.Expr:
    """Return the places of the lower middle elements without NaN, which are last in the order."""
    wide = call.cast(data, wide_dtype(dtype(data)))
    numbers = call.emit(_op.logical_not(call.emit(_op.isnan(wide))))
    count = call.emit(_op.sum(call.cast(numbers, "int64"), [axis], True))
    last = call.emit(_op.maximum(_op.subtract(count, scalar(1, "int64")), scalar(0, "int64")))
    middle = call.emit(_op.floor_divide(last, scalar(2, "int64")))
    return call.emit(_op.gather_elements(order, middle, axis))


def _shared(call: Call, data: relax.Expr, value: relax.Expr) -> relax.Expr:
    """Return the median of all elements, whose gradient equal ones share, and NaN."""
    kind = dtype(data)
    value, fixed = call.emit(stop_gradient(value)), call.emit(stop_gradient(data))
    wide = call.cast(fixed, wide_dtype(kind))
    wrong = call.emit(_op.logical_and(is_nan(call.emit, fixed), is_nan(call.emit, value)))
    ties = call.emit(_op.logical_or(_op.equal(fixed, value), wrong))
    ties = call.emit(_op.logical_and(ties, _op.logical_not(_op.isinf(wide))))
    change = call.emit(_op.where(ties, _op.subtract(data, fixed), scalar(0, kind)))
    change = call.cast(change, wide_dtype(kind))
    count = call.emit(_op.sum(call.cast(ties, wide_dtype(kind))))
    count = call.emit(_op.maximum(count, scalar(1, wide_dtype(kind))))
    mean = call.cast(call.emit(_op.divide(_op.sum(change), count)), kind)
    return _op.add(value, mean)


@converts(SORTING, "bucketize.Tensor", "searchsorted.Tensor")
def _bucketize(
    call: Call,
    data: relax.Expr,
    boundaries: relax.Expr = None,
    out_int32: bool = False,
    right: bool = False,
    sorted_sequence: relax.Expr | None = None,
    side: str | None = None,
    sorter: relax.Expr | None = None,
) -> relax.Expr:
    """Count the boundaries below each value."""
    if sorter is not None:
        raise Refused("a sorter has no form in Relax; sort the boundaries")
    if sorted_sequence is not None:
        boundaries = sorted_sequence
        right = right or side == "right"
    if boundaries.ty.ndim > 1:
        boundaries = call.emit(_op.expand_dims(boundaries, boundaries.ty.ndim - 1))
    else:
        boundaries = call.reshape(boundaries, [1] * data.ty.ndim + extents_of(boundaries))
    compare = _op.less_equal if right else _op.less
    below = call.emit(
        compare(
            boundaries, call.cast(call.emit(_op.expand_dims(data, data.ty.ndim)), dtype(boundaries))
        )
    )
    return _op.sum(call.cast(below, call.dtype), [-1])


@converts(SORTING, "histc.default")
def _histc(call: Call, data: relax.Expr, bins: int, min: float, max: float) -> relax.Expr:
    """Elements beyond the bounds do not count; equal bounds are the data's own."""
    kind = dtype(data)
    flat = stop_gradient(call.reshape(data, [math.prod(static(extents_of(data)))]))
    flat = call.emit(flat)
    if min == max == 0:
        low, high = call.emit(_op.min(flat)), call.emit(_op.max(flat))
        same = call.emit(_op.equal(low, high))
        one = scalar(1, kind)
        low, high = (
            call.emit(_op.where(same, _op.subtract(low, one), low)),
            call.emit(_op.where(same, _op.add(high, one), high)),
        )
    else:
        if min == max:
            min, max = min - 1, max + 1
        low, high = scalar(min, kind), scalar(max, kind)
    scaled = _op.multiply(
        _op.divide(_op.subtract(flat, low), call.emit(_op.subtract(high, low))), scalar(bins, kind)
    )
    place = call.emit(_op.minimum(_op.floor(scaled), scalar(bins - 1, kind)))
    inside = call.emit(_op.logical_and(_op.greater_equal(flat, low), _op.less_equal(flat, high)))
    place = call.emit(_op.where(inside, place, scalar(-1, kind)))
    numbers = relax.const(np.arange(bins), kind)
    hits = _op.equal(_op.expand_dims(place, 1), numbers)
    return _op.sum(call.cast(call.emit(hits), kind), [0])
