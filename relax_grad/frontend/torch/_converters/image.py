"""Converters of operators that resample images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx

from ....ir.compat import Analyzer
from ._call import Call, converts, dtype, extents_of, static, wide_dtype
from ._support import Converter

IMAGE: dict[str, Converter] = {}

_op = relax.op


@converts(IMAGE, "grid_sampler_2d.default", "grid_sampler_3d.default", "grid_sampler.default")
def _grid_sample(
    call: Call,
    data: relax.Expr,
    grid: relax.Expr,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> relax.Expr:
    rank = data.ty.ndim
    kind = dtype(data)
    data, grid = call.cast(data, wide_dtype(kind)), call.cast(grid, wide_dtype(kind))
    grid = call.emit(_op.permute_dims(grid, [0, rank - 1, *range(1, rank - 1)]))
    result = _op.image.grid_sample(
        data,
        grid,
        ("bilinear", "nearest", "bicubic")[interpolation_mode],
        "NCHW" if rank == 4 else "NCDHW",
        ("zeros", "border", "reflection")[padding_mode],
        align_corners,
    )
    return call.cast(call.emit(result), kind)


def _axes(call: Call, data: relax.Expr, scale_factors: list[float] | None) -> list[tuple]:
    """Return each axis of the image, its extents in the image and in the result, and its scale
    factor or None."""
    call.require_windows(data, data.ty.ndim - 2)
    factors: list = scale_factors or [None] * (data.ty.ndim - 2)
    return list(
        zip(itertools.count(2), extents_of(data)[2:], call.shape[2:], factors, strict=False)
    )


def _step(
    call: Call, extent: int | tirx.Expr, size: int | tirx.Expr, factor: float | None, kind: str
) -> float:
    """Return the step in the image for one step in the result: a number, or a tensor for symbolic
    extents."""
    if factor:
        return 1 / factor
    if isinstance(extent, int) and isinstance(size, int):
        return extent / size
    return call.emit(_op.divide(call.tensor(extent, kind), call.tensor(size, kind)))


def _scaled(call: Call, value: relax.Expr, factor: float) -> relax.Expr:
    return call.emit(_op.multiply(value, call.tensor(factor, dtype(value))))


@converts(IMAGE, "upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _nearest(
    call: Call, data: relax.Expr, output_size: list[int] | None, scale_factors: list[float] | None
) -> relax.Expr:
    for axis, extent, size, factor in _axes(call, data, scale_factors):
        ratio = _ratio(extent, size, factor)
        if ratio is not None:
            data = call.emit(_op.repeat(data, ratio, axis)) if ratio > 1 else data
        elif isinstance(extent, int) and isinstance(size, int):
            steps = np.arange(size, dtype="float32") * np.float32(
                _step(call, extent, size, factor, "")
            )
            places = np.minimum(steps.astype("int64"), extent - 1)
            data = call.emit(_op.take(data, relax.const(places), axis))
        else:
            step = _step(call, extent, size, factor, "float32")
            places = call.emit(_op.floor(_scaled(call, call.numbers(size, "float32"), step)))
            data = _taken(call, data, call.cast(places, "int64"), extent, axis)
    return data


def _ratio(extent: int | tirx.Expr, size: int | tirx.Expr, factor: float | None) -> int | None:
    """Return the number of copies of each element if the image becomes larger by a whole factor."""
    analyzer = Analyzer()
    if factor:
        ratio = round(factor)
        if not math.isclose(factor, ratio):
            return None
    elif isinstance(extent, int) and isinstance(size, int):
        ratio = size // extent
    else:
        ratio = 1
    return ratio if ratio and analyzer.can_prove_equal(extent * ratio, size) else None


def _taken(call: Call, data: relax.Expr, places: np.ndarray, extent: int, axis: int) -> relax.Expr:
    """Return the elements at places, which are moved into the axis."""
    last = call.emit(_op.subtract(call.tensor(extent, "int64"), relax.const(1, "int64")))
    places = call.emit(_op.minimum(_op.maximum(places, relax.const(0, "int64")), last))
    return call.emit(_op.take(data, places, axis))


@converts(IMAGE, "upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def _linear(
    call: Call,
    data: relax.Expr,
    output_size: list[int],
    align_corners: bool,
    scale_factors: list[float] | None,
) -> relax.Expr:
    """Each axis is a product with the matrix of the weights, which is constant."""
    return _separable(call, data, align_corners, scale_factors, _linear_weights)


@converts(IMAGE, "upsample_bicubic2d.vec")
def _cubic(
    call: Call,
    data: relax.Expr,
    output_size: list[int] | None,
    align_corners: bool,
    scale_factors: list[float] | None,
) -> relax.Expr:
    return _separable(call, data, align_corners, scale_factors, _cubic_weights)


@converts(
    IMAGE,
    *("_upsample_bilinear2d_aa.default", "_upsample_bilinear2d_aa.vec"),
    *("_upsample_bicubic2d_aa.default", "_upsample_bicubic2d_aa.vec"),
)
def _antialiased(
    call: Call,
    data: relax.Expr,
    output_size: list[int] | None,
    align_corners: bool,
    scale_factors: list[float] | None = None,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> relax.Expr:
    """The filter is as wide as the step in the image, at least one element."""
    kind, shape = dtype(data), call.shape
    cubic = "bicubic" in call.node.target.__name__
    extents = extents_of(data)
    static([*extents[2:], *shape[2:]], "the size of its image")
    factors: list = scale_factors or [scales_h, scales_w]
    data = call.cast(data, wide_dtype(kind))
    for axis, factor in zip((2, 3), factors, strict=True):
        extent, size = extents[axis], shape[axis]
        if align_corners:
            scale = (extent - 1) / (size - 1) if size > 1 else 0.0
        else:
            scale = 1 / factor if factor else extent / size
        if extent != size or scale != 1:
            matrix = relax.const(_filters(extent, size, scale, cubic), wide_dtype(kind))
            data = _applied(call, data, matrix, axis)
    return call.cast(data, kind)


def _filters(extent: int, size: int, scale: float, cubic: bool) -> np.ndarray:
    """Return the weight of each element of an axis in each element of the antialiased result."""
    width = max(scale, 1.0)
    support = (2.0 if cubic else 1.0) * width
    matrix = np.zeros((extent, size))
    for column in range(size):
        center = scale * (column + 0.5)
        begin = max(int(center - support + 0.5), 0)
        end = min(int(center + support + 0.5), extent)
        distance = np.abs((np.arange(begin, end) - center + 0.5) / width)
        if cubic:  # Keys' cubic convolution with a = -0.5
            near = (1.5 * distance - 2.5) * distance**2 + 1
            far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
            weights = np.where(distance < 1, near, np.where(distance < 2, far, 0))
        else:
            weights = np.maximum(1 - distance, 0)
        matrix[begin:end, column] = weights / weights.sum()
    return matrix


def _separable(
    call: Call,
    data: relax.Expr,
    align_corners: bool,
    scale_factors: list[float] | None,
    weights: Callable,
) -> relax.Expr:
    kind = dtype(data)
    data = call.cast(data, wide_dtype(kind))
    for axis, extent, size, factor in _axes(call, data, scale_factors):
        if not (isinstance(extent, int) and isinstance(size, int)):
            data = _weighted(
                call,
                data,
                axis,
                extent,
                size,
                factor=factor,
                align_corners=align_corners,
                weights=weights,
            )
            continue
        scale = _step(call, extent, size, factor, "")
        matrix = _matrix(extent, size, scale, align_corners, weights)
        if matrix is not None:
            data = _applied(call, data, relax.const(matrix, wide_dtype(kind)), axis)
    return call.cast(data, kind)


def _weighted(
    call: Call,
    data: relax.Expr,
    axis: int,
    extent: int,
    size: int,
    factor: float | None,
    align_corners: bool,
    weights: Callable,
) -> relax.Expr:
    """Return the sum of elements with weights that depend on symbolic extents."""
    kind = dtype(data)
    places = call.numbers(size, kind)
    if align_corners:
        one = relax.const(1, kind)
        rest = [call.emit(_op.subtract(call.tensor(count, kind), one)) for count in (extent, size)]
        step = call.emit(_op.divide(rest[0], _op.maximum(rest[1], one)))
        places = _scaled(call, places, step)
    else:
        half = relax.const(0.5, kind)
        step = _step(call, extent, size, factor, kind)
        places = _scaled(call, call.emit(_op.add(places, half)), step)
        places = call.emit(_op.subtract(places, half))
        if weights is _linear_weights:
            places = call.emit(_op.maximum(places, relax.const(0, kind)))
    begin = call.emit(_op.floor(places))
    part = call.emit(_op.subtract(places, begin))
    begin = call.cast(begin, "int64")
    result = None
    for offset, weight in weights(_Number(call, part)):
        place = call.emit(_op.add(begin, relax.const(offset, "int64")))
        pixels = _taken(call, data, place, extent, axis)
        shape = [size, *[1] * (data.ty.ndim - axis - 1)]
        term = call.emit(_op.multiply(pixels, call.reshape(weight.value, shape)))
        result = term if result is None else call.emit(_op.add(result, term))
    return result


class _Number:
    """A tensor in formulas of numbers."""

    def __init__(self, call: Call, value: relax.Expr):
        self.call, self.value = call, value

    def _with(self, function: Callable, other: float | _Number, swapped: bool = False) -> _Number:
        other = other.value if isinstance(other, _Number) else relax.const(other, dtype(self.value))
        operands = (other, self.value) if swapped else (self.value, other)
        return _Number(self.call, self.call.emit(function(*operands)))

    def __add__(self, other: float | _Number) -> _Number:
        return self._with(_op.add, other)

    def __sub__(self, other: float | _Number) -> _Number:
        return self._with(_op.subtract, other)

    def __rsub__(self, other: float | _Number) -> _Number:
        return self._with(_op.subtract, other, True)

    def __mul__(self, other: float | _Number) -> _Number:
        return self._with(_op.multiply, other)

    __radd__, __rmul__ = __add__, __mul__


def _applied(call: Call, data: relax.Expr, matrix: relax.Expr, axis: int) -> relax.Expr:
    """Multiply an axis by a matrix."""
    rank = data.ty.ndim
    if axis == rank - 1:
        return call.emit(_op.matmul(data, matrix))
    order = [*(i for i in range(rank) if i != axis), axis]
    moved = call.emit(_op.matmul(call.emit(_op.permute_dims(data, order)), matrix))
    return call.emit(_op.permute_dims(moved, np.argsort(order).tolist()))


def _matrix(
    extent: int, size: int, scale: float, align_corners: bool, weights: Callable
) -> np.ndarray | None:
    """Return the weight of each element of an axis in each element of the result; None for a
    copy."""
    if align_corners:
        if extent == size:
            return None
        places = np.arange(size) * ((extent - 1) / (size - 1) if size > 1 else 0.0)
    else:
        if extent == size and scale == 1:
            return None
        places = (np.arange(size) + 0.5) * scale - 0.5
    matrix = np.zeros((extent, size))
    for column, place in enumerate(places):
        if weights is _linear_weights and not align_corners:
            place = max(place, 0.0)
        begin = math.floor(place)
        for offset, weight in weights(place - begin):
            matrix[min(max(begin + offset, 0), extent - 1), column] += weight
    return matrix


def _linear_weights(part: Any) -> list:
    """Return the places after the previous one and their weights, for a number or a tensor."""
    return [(0, 1 - part), (1, part)]


def _cubic_weights(part: Any) -> list:
    """Return the weights of Keys' cubic convolution with a = -0.75."""
    a = -0.75

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [(-1, far(part + 1)), (0, near(part)), (1, near(1 - part)), (2, far(2 - part))]
