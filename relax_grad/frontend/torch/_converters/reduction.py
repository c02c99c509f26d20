"""Converters of reductions, of scans along an axis, and of norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from tvm import relax

from ....op import stop_gradient
from ... import extremes
from ...extremes import exact_extreme, log_sum_exp
from ._call import (
    Call,
    axes_of,
    axis_of,
    converts,
    dtype,
    extents_of,
    safe_sqrt,
    scalar,
    static,
    wide_dtype,
)
from ._support import Converter, Refused
from .manipulate import sliced

REDUCTION: dict[str, Converter] = {}

_op = relax.op


def _reduced(
    call: Call, function: Callable, data: relax.Expr, dims: int | list[int] | None, keepdim: bool
) -> relax.Expr:
    """Reduce dimensions; a scalar stays as it is."""
    rank = data.ty.ndim
    if not rank:
        return call.reshape(call.emit(function(call.reshape(data, [1]), [0], False)), [])
    return call.emit(function(data, axes_of(dims, rank), keepdim))


def _require_some(call: Call, data: relax.Expr, dims: int | list[int] | None) -> None:
    shape = extents_of(data)
    call.require_some(shape[axis] for axis in axes_of(dims, len(shape)))


def _dims(dim: int | list[int] | None) -> list | None:
    return [dim] if isinstance(dim, int) else dim


@converts(REDUCTION, "sum.default", "sum.dim_IntList")
def _sum(
    call: Call,
    data: relax.Expr,
    dim: list[int] | None = None,
    keepdim: bool = False,
    dtype: str | None = None,
) -> relax.Expr:
    data = call.cast(data, call.dtype)
    return _reduced(call, _op.sum, data, dim, keepdim)


@converts(REDUCTION, "mean.default", "mean.dim")
def _mean(
    call: Call,
    data: relax.Expr,
    dim: list[int] | None = None,
    keepdim: bool = False,
    dtype: str | None = None,
) -> relax.Expr:
    data = call.cast(data, wide_dtype(call.dtype))
    return call.cast(_reduced(call, _op.mean, data, dim, keepdim), call.dtype)


@converts(REDUCTION, "prod.default", "prod.dim_int")
def _prod(
    call: Call,
    data: relax.Expr,
    dim: int | list[int] | None = None,
    keepdim: bool = False,
    dtype: str | None = None,
) -> relax.Expr:
    data = call.cast(data, call.dtype)
    return _reduced(call, _op.prod, data, _dims(dim), keepdim)


@converts(REDUCTION, "amax.default", "amin.default", "max.default", "min.default")
def _extreme(
    call: Call, data: relax.Expr, dim: int | list[int] | None = None, keepdim: bool = False
) -> relax.Expr:
    """Equal extremes share the gradient."""
    function = _op.max if "max" in call.node.target.__name__ else _op.min
    kind = dtype(data)
    _require_some(call, data, dim)
    if kind == "bool":
        data = call.cast(data, "int8")
    result = call.cast(_reduced(call, function, data, dim, keepdim), kind)
    if "float" not in kind:
        return result
    largest = function is _op.max
    return exact_extreme(
        call.emit, data, result, lambda v: _reduced(call, _op.sum, v, dim, keepdim), largest
    )


@converts(REDUCTION, "any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims")
def _any(
    call: Call, data: relax.Expr, dim: int | list[int] | None = None, keepdim: bool = False
) -> relax.Expr:
    function = _op.max if "any" in call.node.target.__name__ else _op.min
    data = call.cast(call.cast(data, "bool"), "int8")
    found = call.emit(_reduced(call, function, data, _dims(dim), keepdim))
    # The extremes of no elements are the limits of int8.
    return call.cast(call.emit(_op.greater(found, scalar(0, "int8"))), call.dtype)


def place_of_extreme(call: Call, data: relax.Expr, axis: int, largest: bool) -> relax.Expr:
    """Return the first place of the extreme of an axis, which is kept; NaN counts as extreme."""
    data = call.cast(data, "int8") if dtype(data) == "bool" else data
    return extremes.place_of_extreme(call.emit, data, axis, largest)


@converts(REDUCTION, "max.dim", "min.dim")
def _extreme_and_place(
    call: Call, data: relax.Expr, dim: int, keepdim: bool
) -> tuple[relax.Expr, relax.Expr]:
    """The first extreme has the whole gradient."""
    largest = call.node.target.__name__ == "max.dim"
    if not data.ty.ndim:
        return data, _op.zeros([], "int64")
    axis = axis_of(dim, data.ty.ndim)
    _require_some(call, data, axis)
    place = place_of_extreme(call, data, axis, largest)
    return _gathered(call, data, place, axis, keepdim)


def _gathered(call: Call, data: relax.Expr, place: relax.Expr, axis: int, keepdim: bool) -> tuple:
    kind = dtype(data)
    inner = call.cast(data, "int8") if kind == "bool" else data
    value = call.cast(call.emit(_op.gather_elements(inner, place, axis)), kind)
    if keepdim:
        return value, place
    return call.reshape(value, call.shape), call.reshape(place, call.shape)


@converts(REDUCTION, "argmax.default", "argmin.default")
def _argmax(call: Call, data: relax.Expr, dim: int, keepdim: bool) -> relax.Expr:
    shape = call.shape
    if not data.ty.ndim:
        return _op.zeros([], "int64")
    _require_some(call, data, dim)
    if dim is None:
        data, dim = call.emit(_op.reshape(data, [-1])), 0
    largest = call.node.target.__name__ == "argmax.default"
    place = place_of_extreme(call, data, axis_of(dim, data.ty.ndim), largest)
    return _op.reshape(place, shape)


def _variance(
    call: Call,
    data: relax.Expr,
    dim: int | list[int] | None,
    correction: float | None,
    keepdim: bool,
) -> relax.Expr:
    correction = 1 if correction is None else correction
    rank, kind = data.ty.ndim, dtype(data)
    if not rank:
        data, rank, keepdim, dim = call.reshape(data, [1]), 1, False, None
    axes = axes_of(dim, rank)
    # The mean of equal elements is rounded, but their variance is 0, and so is its gradient.
    largest = call.emit(stop_gradient(call.emit(_op.max(data, axes, True))))
    data = call.emit(_op.subtract(data, largest))
    variance = call.emit(_op.variance(data, axes, keepdim))
    if correction == 0:
        return variance
    count = call.count([extents_of(data)[axis] for axis in axes], kind)
    less = _op.maximum(_op.subtract(count, scalar(correction, kind)), scalar(0, kind))
    return call.emit(_op.multiply(variance, _op.divide(count, less)))


@converts(REDUCTION, "var.correction", "var.dim", "var.default")
def _var(
    call: Call,
    data: relax.Expr,
    dim: list[int] | None = None,
    correction: float | None = None,
    keepdim: bool = False,
    unbiased: bool | None = None,
) -> relax.Expr:
    correction = correction if unbiased is None else int(unbiased)
    variance = _variance(call, call.cast(data, wide_dtype(dtype(data))), dim, correction, keepdim)
    return call.cast(variance, call.dtype)


@converts(REDUCTION, "std.correction", "std.dim", "std.default")
def _std(
    call: Call,
    data: relax.Expr,
    dim: int | list[int] | None = None,
    correction: float | None = None,
    keepdim: bool = False,
    unbiased: bool | None = None,
) -> relax.Expr:
    correction = correction if unbiased is None else int(unbiased)
    variance = _variance(call, call.cast(data, wide_dtype(dtype(data))), dim, correction, keepdim)
    return call.cast(safe_sqrt(call, variance), call.dtype)


@converts(REDUCTION, "var_mean.correction")
def _var_mean(
    call: Call,
    data: relax.Expr,
    dim: int | list[int] | None,
    correction: float | None,
    keepdim: bool,
) -> tuple:
    inner = call.cast(data, wide_dtype(dtype(data)))
    variance = _variance(call, inner, dim, correction, keepdim)
    mean = _reduced(call, _op.mean, inner, dim, keepdim)
    return call.cast(variance, call.dtype), call.cast(mean, call.dtype)


@converts(REDUCTION, "linalg_vector_norm.default")
def _vector_norm(
    call: Call, data: relax.Expr, ord: float, dim: list[int], keepdim: bool, dtype: str | None
) -> relax.Expr:
    kind = wide_dtype(call.dtype)
    data = call.cast(data, kind)
    return call.cast(norm(call, data, float(ord), dim, keepdim), call.dtype)


def norm(call: Call, data: relax.Expr, order: float, dims: list[int], keepdim: bool) -> relax.Expr:
    """Return the norm of any order; its gradient is zero at zero."""
    kind = dtype(data)

    def reduced(function: Callable, value: relax.Expr) -> relax.Expr:
        return _reduced(call, function, call.emit(value), dims, keepdim)

    zero = scalar(0, kind)
    if order == 2:
        return safe_sqrt(call, reduced(_op.sum, _op.multiply(data, data)))
    if order == 0:
        return reduced(_op.sum, call.cast(call.emit(_op.not_equal(data, zero)), kind))
    size = call.emit(_op.abs(data))
    if order == 1:
        return reduced(_op.sum, size)
    if order in (float("inf"), float("-inf")):
        _require_some(call, data, dims)
        result = call.emit(reduced(_op.max if order > 0 else _op.min, size))
        total = functools.partial(reduced, _op.sum)
        return call.emit(exact_extreme(call.emit, size, result, total, order > 0))
    if order < 0:
        raise Refused("norms of a negative order have no form here")
    nothing = call.emit(_op.less_equal(size, zero))  # False for NaN, which stays
    safe = call.emit(_op.where(nothing, scalar(1, kind), size))
    powers = _op.where(nothing, zero, _op.power(safe, scalar(order, kind)))
    total = call.emit(reduced(_op.sum, powers))
    nothing = call.emit(_op.less_equal(total, zero))
    root = _op.power(_op.where(nothing, scalar(1, kind), total), scalar(1 / order, kind))
    return call.emit(_op.where(nothing, stop_gradient(total), root))


@converts(REDUCTION, "cumsum.default", "cumprod.default")
def _scan(call: Call, data: relax.Expr, dim: int, dtype: str | None = None) -> relax.Expr:
    data = call.cast(data, call.dtype)
    if not data.ty.ndim:
        return data
    function = _op.cumsum if "sum" in call.node.target.__name__ else _op.cumprod
    return function(data, axis_of(dim, data.ty.ndim))


@converts(REDUCTION, "logcumsumexp.default")
def _logcumsumexp(call: Call, data: relax.Expr, dim: int) -> relax.Expr:
    """Each step joins an element with the one twice as far before it as in the step before.

    A common base for the whole axis would lose elements far below it.
    """
    if not data.ty.ndim:
        return data
    axis = axis_of(dim, data.ty.ndim)
    shape = extents_of(data)
    (extent,) = static([shape[axis]], "the axis of logcumsumexp")
    kind = dtype(data)
    total, step = call.cast(data, wide_dtype(kind)), 1
    while step < extent:
        none = call.filled([*shape[:axis], step, *shape[axis + 1 :]], -math.inf, dtype(total))
        before = sliced(call, total, axis, 0, extent - step)
        shifted = call.emit(_op.concat([none, before], axis))
        total, step = call.emit(_op.log_add_exp(total, shifted)), 2 * step
    return call.cast(total, kind)


@converts(REDUCTION, "cummax.default", "cummin.default")
def _cumulative_extreme(call: Call, data: relax.Expr, dim: int) -> tuple[relax.Expr, relax.Expr]:
    """Find the places by steps that double, as in logcumsumexp. The last one of equal elements
    counts, and so does NaN."""
    if not data.ty.ndim:
        return data, _op.zeros([], "int64")
    axis = axis_of(dim, data.ty.ndim)
    shape = extents_of(data)
    name = call.node.target.__name__
    (extent,) = static([shape[axis]], f"the axis of {name.partition('.')[0]}")
    inner = call.cast(data, "int8" if dtype(data) == "bool" else wide_dtype(dtype(data)))
    beats = _op.greater if "max" in name else _op.less
    best = call.emit(stop_gradient(inner))
    place = call.reshape(relax.const(np.arange(extent)), [extent, *[1] * (data.ty.ndim - axis - 1)])
    place = call.emit(_op.broadcast_to(place, shape))
    step = 1
    while step < extent:

        def shifted(value: relax.Expr, by: int = step) -> relax.Expr:
            first, rest = (
                sliced(call, value, axis, 0, by),
                sliced(call, value, axis, 0, extent - by),
            )
            return call.emit(_op.concat([first, rest], axis))

        before = shifted(best)
        wins = call.emit(beats(before, best))
        if "float" in dtype(inner):
            wrong = call.emit(_op.isnan(best))
            wins = call.emit(_op.logical_or(wins, _op.isnan(before)))
            wins = call.emit(_op.logical_and(wins, _op.logical_not(wrong)))
        place = call.emit(_op.where(wins, shifted(place), place))
        best, step = call.emit(_op.where(wins, before, best)), 2 * step
    value = call.emit(_op.gather_elements(inner, place, axis))
    return call.cast(value, dtype(data)), place


@converts(REDUCTION, "logsumexp.default")
def _logsumexp(
    call: Call, data: relax.Expr, dim: int | list[int] | None, keepdim: bool
) -> relax.Expr:
    """An axis of equal infinities has its own value."""
    kind = call.dtype
    data = call.cast(data, wide_dtype(kind))
    rank = data.ty.ndim
    if not rank:
        return data
    result = log_sum_exp(call.emit, data, axes_of(dim, rank))
    return call.cast(call.reshape(result, call.shape), kind)


@converts(REDUCTION, "dist.default")
def _dist(call: Call, data: relax.Expr, other: relax.Expr, p: float = 2) -> relax.Expr:
    difference = call.emit(_op.subtract(data, other))
    kind = dtype(difference)
    inner = call.cast(difference, wide_dtype(kind))
    result = norm(call, inner, float(p), list(range(inner.ty.ndim)), False)
    return call.cast(call.emit(result), kind)
