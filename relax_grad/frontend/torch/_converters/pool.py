"""Converters of pooling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, tirx

from ....op import stop_gradient
from ._call import Call, converts, dtype, extents_of, scalar, static, wide_dtype
from ._support import Converter, Refused
from .conv import repeated
from .reduction import place_of_extreme

POOL: dict[str, Converter] = {}

_op = relax.op


def _batched(call: Call, data: relax.Expr, rank: int) -> relax.Expr:
    """Return the operand with a batch dimension."""
    return data if data.ty.ndim == rank + 2 else call.reshape(data, [1, *extents_of(data)])


def _unbatched(call: Call, result: relax.Expr) -> relax.Expr:
    result = call.emit(result)
    return result if result.ty.ndim == len(call.shape) else call.reshape(result, call.shape)


def _avg_pool(rank: int) -> Callable:
    def convert(
        call: Call,
        data: relax.Expr,
        kernel_size: list[int],
        stride: list[int],
        padding: list[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None = None,
    ) -> relax.Expr:
        call.require_windows(data, rank)
        kernel, padding = repeated(kernel_size, rank), repeated(padding, rank)
        stride = repeated(stride, rank) if stride else kernel
        if divisor_override and ceil_mode:
            raise Refused("ceil_mode with divisor_override has no form in Relax")
        counts_all = count_include_pad or bool(divisor_override)
        kind = dtype(data)
        result = getattr(_op.nn, f"avg_pool{rank}d")(
            call.cast(_batched(call, data, rank), wide_dtype(kind)),
            kernel,
            stride,
            padding * 2,
            [1] * rank,
            ceil_mode,
            counts_all,
        )
        if divisor_override:
            factor = math.prod(kernel) / divisor_override
            result = _op.multiply(result, scalar(factor, wide_dtype(kind)))
        return call.cast(_unbatched(call, result), kind)

    return convert


def _max_pool(rank: int) -> Callable:
    def convert(
        call: Call,
        data: relax.Expr,
        kernel_size: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        ceil_mode: bool,
    ) -> relax.Expr | tuple[relax.Expr, relax.Expr]:
        call.require_windows(data, rank)
        kernel = repeated(kernel_size, rank)
        padding, dilation = repeated(padding, rank), repeated(dilation, rank)
        stride = repeated(stride, rank) if stride else kernel
        if "indices" in call.node.target.__name__ and call.uses(1):
            places = [
                _window_places(*window)
                for window in zip(
                    static(extents_of(data)[-rank:]),
                    static(call.shape[-rank:]),
                    *(kernel, stride, padding, dilation),
                    strict=True,
                )
            ]
            return _maxima(call, data, places)
        result = getattr(_op.nn, f"max_pool{rank}d")(
            _batched(call, data, rank), kernel, stride, padding * 2, dilation, ceil_mode
        )
        result = _unbatched(call, result)
        return (result, None) if isinstance(call.value, (tuple, list)) else result

    return convert


def _adaptive_avg_pool(rank: int) -> Callable:
    def convert(call: Call, data: relax.Expr, output_size: list[int]) -> relax.Expr:
        kind = dtype(data)
        data = call.cast(_batched(call, data, rank), wide_dtype(kind))
        sizes = call.shape[-rank:]
        call.require_some(extents_of(data)[-rank:])
        if all(size == 1 for size in sizes):
            result = _op.mean(data, list(range(2, rank + 2)), True)
        else:
            result = getattr(_op.nn, f"adaptive_avg_pool{rank}d")(data, static(sizes))
        return call.cast(_unbatched(call, result), kind)

    return convert


def _adaptive_max_pool(rank: int) -> Callable:
    def convert(
        call: Call, data: relax.Expr, output_size: list[int]
    ) -> tuple[relax.Expr, relax.Expr | None]:
        """Take the maxima of windows that have two extents along each axis."""
        places = []
        sizes = zip(static(extents_of(data)[-rank:]), static(call.shape[-rank:]), strict=True)
        extent: Any
        size: Any
        for extent, size in sizes:
            begins = np.arange(size) * extent // size
            ends = -((-np.arange(1, size + 1) * extent) // size)
            inside = begins[:, None] + np.arange(int((ends - begins).max()))
            places.append(np.minimum(inside, ends[:, None] - 1))
        return _maxima(call, data, places)

    return convert


def _window_places(
    extent: int | tirx.Expr,
    size: int | tirx.Expr,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
) -> np.ndarray:
    """Return the elements of each window of an axis; those beyond the bounds are the first one
    within."""
    inside = np.arange(size)[:, None] * stride - padding + np.arange(kernel) * dilation
    valid = (inside >= 0) & (inside < extent)
    first = np.take_along_axis(inside, valid.argmax(1)[:, None], 1)
    return np.where(valid, inside, first)


def _maxima(
    call: Call, data: relax.Expr, places: list[np.ndarray]
) -> tuple[relax.Expr, relax.Expr | None]:
    """Gather the windows, whose elements are given for each axis, and take each one's first maximum
    and its index."""
    rank, sizes = len(places), [len(bounds) for bounds in places]
    data = _batched(call, data, rank)
    shape = static(extents_of(data))
    flat = None
    for k, inside in enumerate(places):
        inside = inside.astype("int64")
        data = call.emit(_op.take(data, relax.const(inside), 2 + 2 * k))
        step = inside.reshape([*[1] * (2 * k), *inside.shape, *[1] * (2 * (rank - 1 - k))])
        flat = step if flat is None else flat * shape[2 + k] + step
    order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
    moved = call.emit(_op.permute_dims(data, [0, 1, *(2 + axis for axis in order)]))
    windows = call.reshape(moved, [*shape[:2], *sizes, -1])
    place = place_of_extreme(call, windows, rank + 2, True)
    value = call.emit(_op.gather_elements(windows, place, rank + 2))
    value = call.reshape(value, call.shape)
    if not call.uses(1):
        return value, None
    table = np.transpose(flat, order).reshape([1, 1, *sizes, -1])
    table = call.emit(_op.broadcast_to(relax.const(table.astype("int64")), extents_of(windows)))
    index = call.emit(_op.gather_elements(table, place, rank + 2))
    return value, call.reshape(index, call.shape)


@converts(POOL, "max_unpool2d.default", "max_unpool3d.default")
def _max_unpool(
    call: Call,
    data: relax.Expr,
    indices: relax.Expr,
    output_size: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
) -> relax.Expr:
    """Of windows that overlap, each has the whole gradient of the element that they have in
    common."""
    shape, rank = call.shape, len(output_size)
    flat = [*shape[:-rank], math.prod(static(shape[-rank:]))]
    data, indices = (
        call.reshape(tensor, [*shape[:-rank], math.prod(static(extents_of(tensor)[-rank:]))])
        for tensor in (data, indices)
    )
    none = call.emit(_op.broadcast_to(scalar(0, dtype(data)), flat))
    axis = len(flat) - 1
    fixed = call.emit(stop_gradient(data))
    value = call.emit(_op.scatter_elements(none, indices, fixed, axis, "update"))
    # The difference below would make an infinity NaN.
    finite = call.emit(_op.where(_op.isfinite(fixed), data, scalar(0, dtype(data))))
    total = call.emit(_op.scatter_elements(none, indices, finite, axis, "add"))
    change = call.emit(_op.subtract(total, call.emit(stop_gradient(total))))
    return call.reshape(call.emit(_op.add(value, change)), shape)


for _rank in (1, 2, 3):
    converts(POOL, f"avg_pool{_rank}d.default")(_avg_pool(_rank))
    converts(POOL, f"max_pool{_rank}d.default", f"max_pool{_rank}d_with_indices.default")(
        _max_pool(_rank)
    )
    converts(
        POOL,
        f"adaptive_avg_pool{_rank}d.default",
        f"_adaptive_avg_pool{_rank}d.default",
    )(_adaptive_avg_pool(_rank))
    converts(POOL, f"adaptive_max_pool{_rank}d.default")(_adaptive_max_pool(_rank))
