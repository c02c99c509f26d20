"""Interpolation along an axis by the places of the elements, for what Relax's resizing operators do
not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tvm import relax, tirx
from tvm.relax import op

from ..extents.values import Known, is_symbolic, objects
from .converters import Builder, Refused, _dtype, _extents, _rank
from .symbolic import tensor_of

#: The most elements of which one result of an antialiasing filter is made.
_MOST_TAPS = 256


class Settings(NamedTuple):
    """The attributes of a resizing node.

    Attributes
    ----------
    mode : str
        ``"nearest"``, ``"linear"`` or ``"cubic"``.
    coordinates : str
        The place of an element of the result in the data, as ``coordinate_transformation_mode`` has
        it.
    rounding : str
        The rounding of such a place, for the mode ``"nearest"``.
    cubic : float
        The coefficient of the cubic curve.
    excludes : bool
        Whether elements outside of the data have no weight.
    extrapolated : float
        The value of places outside of the region of interest.
    smooth : bool
        Whether the filter of a smaller result covers all elements of the data.
    """

    mode: str
    coordinates: str
    rounding: str = ""
    cubic: float = -0.75
    excludes: bool = False
    extrapolated: float = 0.0
    smooth: bool = False


class Region(NamedTuple):
    """The part of an axis that is resized, as shares of the axis, for the coordinates
    ``tf_crop_and_resize``."""

    start: float = 0.0
    end: float = 1.0


def interpolated(
    bb: Builder,
    data: relax.Expr,
    axis: int,
    size: tirx.Expr | int,
    scale: float | None,
    settings: Settings,
    region: Region,
) -> relax.Expr:
    """Return data with another extent of an axis.

    Parameters
    ----------
    data : relax.Expr
        The data.
    axis : int
        The axis.
    size : int or tirx.Expr
        The new extent.
    scale : float or None
        The factor of the extent; None for the quotient of the extents.
    settings : Settings
        The attributes of the node.
    region : Region
        The part of the axis.
    """
    extent, rank = _extents(data)[axis], _rank(data)
    if settings.mode != "nearest" and "float" not in _dtype(data):
        raise Refused(
            f"its operand has the dtype {_dtype(data)}, which is interpolated by nearest "
            "elements only; cast it before"
        )
    # Places of the nearest elements are computed as ONNX Runtime does, whose rounding decides
    # between two elements.
    dtype = "float32" if settings.mode == "nearest" else "float64"
    count = _number(bb, extent, dtype)
    place = _places(bb, extent, size, scale, settings.coordinates, region=region, dtype=dtype)
    if settings.mode == "nearest":
        if settings.smooth:
            raise Refused("antialiasing has no meaning for the mode nearest")
        index = bb.emit(op.astype(_rounded(bb, place, settings.rounding), "int64"))
        result = bb.emit(op.take(data, index, axis, "clip"))
    else:
        result = _filtered(
            bb, data, axis, place, count, extent=extent, size=size, scale=scale, settings=settings
        )
    if settings.coordinates != "tf_crop_and_resize":
        return result
    last = bb.emit(op.subtract(count, relax.const(1, dtype)))
    is_behind = bb.emit(op.less(place, relax.const(0, dtype)))
    outside = bb.emit(op.logical_or(is_behind, bb.emit(op.greater(place, last))))
    outside = bb.emit(op.reshape(outside, [-1 if i == axis else 1 for i in range(rank)]))
    return bb.emit(op.where(outside, relax.const(settings.extrapolated, _dtype(data)), result))


def _number(bb: Builder, value: tirx.Expr | int, dtype: str) -> relax.Expr:
    """Return an extent as a tensor of one element."""
    number = tensor_of(bb, Known(objects([value], (1,)), "int64"))
    return bb.emit(op.astype(number, dtype))


def _places(
    bb: Builder,
    extent: tirx.Expr | int,
    size: tirx.Expr | int,
    scale: float | None,
    coordinates: str,
    region: Region,
    dtype: str,
) -> relax.Expr:
    """Return the place in the data of each element of the result."""

    def number(value: float) -> relax.Expr:
        return relax.const(value, dtype)

    def calculate(function: Callable, *operands: relax.Expr) -> relax.Expr:
        return bb.emit(function(*operands))

    steps = bb.emit(op.astype(bb.emit(op.arange(0, size, 1, "int64")), dtype))
    old, new = _number(bb, extent, dtype), _number(bb, size, dtype)
    factor = number(scale) if scale is not None else calculate(op.divide, new, old)
    if coordinates == "asymmetric":
        return calculate(op.divide, steps, factor)
    if coordinates in ("align_corners", "tf_crop_and_resize"):
        one = number(1)
        room = calculate(op.subtract, old, one)
        if scale is not None:  # the length before it is rounded down to an extent
            new = calculate(op.multiply, old, factor)
        gaps = calculate(op.subtract, new, one)
        first, share = number(0), number(region.end - region.start)
        if coordinates == "tf_crop_and_resize":
            first = calculate(op.multiply, number(region.start), room)
            room = calculate(op.multiply, share, room)
        is_one = calculate(op.less_equal, new, one)
        gaps = calculate(op.where, is_one, one, gaps)
        spread = calculate(op.divide, calculate(op.multiply, steps, room), gaps)
        single = first
        if coordinates == "tf_crop_and_resize":
            middle = calculate(op.subtract, old, one)
            single = calculate(op.multiply, number(0.5 * (region.start + region.end)), middle)
        return calculate(op.where, is_one, single, calculate(op.add, first, spread))
    half = number(0.5)
    middle = calculate(op.divide, calculate(op.add, steps, half), factor)
    place = calculate(op.subtract, middle, half)
    if coordinates == "half_pixel":
        return place
    if coordinates == "pytorch_half_pixel":
        return calculate(op.where, calculate(op.greater, new, number(1)), place, number(0))
    if coordinates == "tf_half_pixel_for_nn":
        return middle
    if coordinates == "half_pixel_symmetric":
        length = calculate(op.multiply, factor, old)
        rest = calculate(op.subtract, number(1), calculate(op.divide, new, length))
        offset = calculate(op.multiply, calculate(op.multiply, old, half), rest)
        return calculate(op.add, place, offset)
    raise Refused(f"its coordinates {coordinates} differ from ONNX")


def _rounded(bb: Builder, place: relax.Expr, rounding: str) -> relax.Expr:
    if rounding == "floor":
        return bb.emit(op.floor(place))
    if rounding == "ceil":
        return bb.emit(op.ceil(place))
    half = relax.const(0.5, _dtype(place))
    if rounding == "round_prefer_ceil":
        return bb.emit(op.floor(bb.emit(op.add(place, half))))
    return bb.emit(op.ceil(bb.emit(op.subtract(place, half))))


def _filtered(
    bb: Builder,
    data: relax.Expr,
    axis: int,
    place: relax.Expr,
    count: relax.Expr,
    extent: tirx.Expr | int,
    size: tirx.Expr | int,
    scale: float | None,
    settings: Settings,
) -> relax.Expr:
    """Return the sums of neighbours with the weights of a filter."""
    support, stretch = 1 if settings.mode == "linear" else 2, 1.0
    if settings.smooth:
        if scale is None and (is_symbolic(extent) or is_symbolic(size)):
            raise Refused(
                "it has antialias=1, and the extents whose quotient is its scale are symbolic; "
                "give them: shapes={...}"
            )
        stretch = min(1.0, scale if scale is not None else size / extent)
    reach = math.ceil(support / stretch)
    if 2 * reach > _MOST_TAPS:
        raise Refused(
            f"its scale {stretch:g} needs {2 * reach} elements for each; at most {_MOST_TAPS} "
            "are supported"
        )
    dtype, kind, rank = _dtype(place), _dtype(data), _rank(data)

    def number(value: float) -> relax.Expr:
        return relax.const(value, dtype)

    base = bb.emit(op.floor(place))
    weights, indices = [], []
    last = bb.emit(op.subtract(count, number(1)))
    for tap in range(1 - reach, reach + 1):
        index = bb.emit(op.add(base, number(float(tap))))
        distance = bb.emit(op.abs(bb.emit(op.subtract(index, place))))
        if stretch < 1:
            distance = bb.emit(op.multiply(distance, number(stretch)))
        weight = _curve(bb, distance, settings)
        if settings.excludes:
            is_behind = bb.emit(op.less(index, number(0)))
            is_outside = bb.emit(op.logical_or(is_behind, bb.emit(op.greater(index, last))))
            weight = bb.emit(op.where(is_outside, number(0), weight))
        weights.append(weight)
        indices.append(bb.emit(op.astype(index, "int64")))
    if settings.excludes or stretch < 1:
        total = weights[0]
        for term in weights[1:]:
            total = bb.emit(op.add(total, term))
        weights = [bb.emit(op.divide(term, total)) for term in weights]
    result, shape = None, [-1 if i == axis else 1 for i in range(rank)]
    for index, weight in zip(indices, weights, strict=True):
        part = bb.emit(op.take(data, index, axis, "clip"))
        weight = bb.emit(op.reshape(weight, shape))
        weight = weight if dtype == kind else bb.emit(op.astype(weight, kind))
        part = bb.emit(op.multiply(part, weight))
        result = part if result is None else bb.emit(op.add(result, part))
    return result


def _curve(bb: Builder, distance: relax.Expr, settings: Settings) -> relax.Expr:
    """Return the weight of an element at a distance."""
    dtype = _dtype(distance)

    def number(value: float) -> relax.Expr:
        return relax.const(value, dtype)

    def polynomial(*coefficients: float) -> relax.Expr:
        total = number(coefficients[0])
        for coefficient in coefficients[1:]:
            total = bb.emit(op.add(bb.emit(op.multiply(total, distance)), number(coefficient)))
        return total

    if settings.mode == "linear":
        return bb.emit(op.maximum(polynomial(-1.0, 1.0), number(0)))
    a = settings.cubic
    near = polynomial(a + 2, -(a + 3), 0.0, 1.0)
    far = polynomial(a, -5 * a, 8 * a, -4 * a)
    far = bb.emit(op.where(bb.emit(op.less(distance, number(2))), far, number(0)))
    return bb.emit(op.where(bb.emit(op.less_equal(distance, number(1))), near, far))
