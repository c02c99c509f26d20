"""Tensor expressions of roi_align and of its gradients.

Each bin of a region is sampled on a regular grid with bilinear interpolation.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tvm import te, tirx, topi
from tvm.script.ir_builder import tirx as T

from ..ir.dtypes import accumulation_dtype
from ._loops import loops, statements, tasks
from ._regions import (
    LARGEST,
    Plane,
    batch_of,
    bins_shape,
    bounds,
    place_of,
    pooled_shape,
    scatter,
    table,
)
from .util import Shape, axes, cast, is_empty, on_gpu, zeros


class _Align(NamedTuple):
    """Tables of the regions of roi_align, of shape ``[region]``: tensors, or buffers in
    statements."""

    batch: te.Tensor  # -1 if out of bounds
    top: te.Tensor
    left: te.Tensor
    bin_height: te.Tensor
    bin_width: te.Tensor
    rows: te.Tensor  # rows of samples in a bin
    columns: te.Tensor


def roi_align(data: te.Tensor, rois: te.Tensor, **attrs: Any) -> te.Tensor:
    """Average or maximum of the samples of each bin: ``topi.vision.roi_align`` without reads
    outside the data.

    Parameters
    ----------
    data : te.Tensor
        The data.
    rois : te.Tensor
        The regions, of shape ``(number, 5)``.
    **attrs
        ``pooled_size``, ``spatial_scale``, ``sample_ratio``, ``aligned``, ``layout`` and ``mode``,
        as ``relax.op.vision.roi_align`` takes them.

    Returns
    -------
    result : te.Tensor
        A tensor of the dtype of the data; half precision is computed in float32. A bin without
        samples is 0.
    """
    at = axes(attrs["layout"], "NCHW")
    shape = pooled_shape(data.shape, rois, attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, data.dtype)
    dtype = accumulation_dtype(data.dtype, rois.dtype)
    regions = _align(data.shape, rois, attrs)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        r, c, *bin_ = (index[axis] for axis in at)
        rows, columns = regions.rows[r], regions.columns[r]
        samples = te.reduce_axis((0, rows), "row"), te.reduce_axis((0, columns), "column")
        value = _sample(data, regions, r, c, bin_, samples=samples, at=at, dtype=dtype)
        if attrs["mode"] == "max":
            return te.max(value, axis=samples)
        return te.sum(value / (rows * columns).astype(dtype), axis=samples)

    pooled = te.compute(shape, element, name="roi_align")

    def filled(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        r = index[at[0]]
        return tirx.if_then_else(
            tirx.all(regions.rows[r] > 0, regions.columns[r] > 0),
            pooled(*index),
            tirx.const(0, dtype),
        ).astype(data.dtype)

    return te.compute(shape, filled, name="roi_align_filled", tag=topi.tag.INJECTIVE)


def roi_align_backward_data(
    output_grad: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs: Any
) -> te.Tensor:
    """Gradient of roi_align with respect to the data: each sample adds to the elements around it.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    data, rois, **attrs
        As for :func:`roi_align`. Only ``mode="max"`` reads the values of the data: the gradient
        goes to the first of the largest samples. Otherwise only the shape of the data is used.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the data; half precision is accumulated in float32. A
        parallel task owns all elements that it adds to, so the order of the sums is always the
        same.
    """
    if is_empty(output_grad.shape) or is_empty(data.shape):
        return zeros(data.shape, data.dtype)
    at = axes(attrs["layout"], "NCHW")
    dtype = accumulation_dtype(data.dtype, rois.dtype)
    regions = _align(data.shape, rois, attrs)
    if attrs["mode"] == "max":
        positions, weights = _largest_samples(data, regions, attrs, dtype)

        def add_largest(
            plane: Plane,
            grad: tirx.Buffer,
            positions: tirx.Buffer,
            weights: tirx.Buffer,
            _: _Align,
            r: tirx.PrimExpr,
            c: tirx.PrimExpr,
            bin_: Sequence[tirx.PrimExpr],
        ) -> None:
            value = grad[place_of(at, r, c, *bin_)].astype(dtype)
            for (y, wy), (x, wx) in _corners(positions, weights, (r, c, *bin_)):
                with T.If(tirx.all(y >= 0, x >= 0)), T.Then():
                    plane.add(y, x, wy * wx * value)

        inputs = [output_grad, positions, weights]
        total = scatter(add_largest, inputs, regions, data.shape, attrs, dtype=dtype)
        return cast(total, data.dtype)

    def add_bin(
        plane: Plane,
        grad: tirx.Buffer,
        regions: _Align,
        r: tirx.PrimExpr,
        c: tirx.PrimExpr,
        bin_: Sequence[tirx.PrimExpr],
        positions: tirx.Buffer,
        weights: tirx.Buffer,
        scratch: Sequence[tirx.PrimExpr],
    ) -> None:
        rows, columns = regions.rows[r], regions.columns[r]
        value = grad[place_of(at, r, c, *bin_)].astype(dtype) / (rows * columns).astype(dtype)

        def store(axis: int, sample: tirx.PrimExpr) -> None:
            which, extent = bin_[axis], data.shape[at[2 + axis]]
            _store_taps(
                regions,
                axis,
                r,
                which,
                sample,
                extent=extent,
                positions=positions,
                weights=weights,
                at=scratch,
            )

        with T.serial(rows) as i:
            store(0, i)
            taps = [positions[(*scratch, tap)] for tap in (0, 1)]
            with plane.if_owned(*taps), T.serial(columns) as j:
                store(1, j)
                for (y, wy), (x, wx) in _corners(positions, weights, scratch):
                    with T.If(tirx.all(y >= 0, x >= 0)), T.Then():
                        plane.add(y, x, wy * wx * value)

    total = scatter(add_bin, [output_grad], regions, data.shape, attrs, dtype=dtype, scratch=True)
    return cast(total, data.dtype)


def roi_align_jvp(
    direction: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs: Any
) -> te.Tensor:
    """Derivative of roi_align along a direction of the data.

    Parameters
    ----------
    direction : te.Tensor
        The direction, of the shape of the data.
    data, rois, **attrs
        As for :func:`roi_align`.

    Returns
    -------
    result : te.Tensor
        With ``mode="max"``, the direction at the first of the largest samples of each bin;
        otherwise ``roi_align(direction, rois)``.
    """
    shape = pooled_shape(data.shape, rois, attrs)
    if attrs["mode"] != "max":
        return roi_align(direction, rois, **attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, direction.dtype)
    at = axes(attrs["layout"], "NCHW")
    dtype = accumulation_dtype(data.dtype, rois.dtype)
    regions = _align(data.shape, rois, attrs)
    positions, weights = _largest_samples(data, regions, attrs, dtype)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        r, c, *bin_ = (index[axis] for axis in at)
        batch, total = regions.batch[r], tirx.const(0, dtype)
        for (y, wy), (x, wx) in _corners(positions, weights, (r, c, *bin_)):
            value = direction[place_of(at, batch, c, y, x)].astype(dtype)
            inside = tirx.all(batch >= 0, y >= 0, x >= 0)
            total += tirx.if_then_else(inside, wy * wx * value, tirx.const(0, dtype))
        return total.astype(direction.dtype)

    return te.compute(shape, element, name="roi_align_jvp", tag=topi.tag.INJECTIVE)


def _align(data_shape: Shape, rois: te.Tensor, attrs: dict) -> _Align:
    """Compute the tables of roi_align."""
    dtype = accumulation_dtype(rois.dtype)

    def const(value: float) -> tirx.PrimExpr:
        return tirx.const(value, dtype)

    def length(axis: int) -> te.Tensor:
        """Return a table of the bin length of each region."""
        begin, end = bounds(rois, axis, attrs, dtype)

        def of(r: tirx.PrimExpr) -> tirx.PrimExpr:
            total = end(r) - begin(r)
            if not attrs["aligned"]:
                total = tirx.max(total, const(1))
            return total / const(attrs["pooled_size"][axis])

        return table(rois, of)

    def count(lengths: te.Tensor) -> te.Tensor:
        """Return a table of the number of samples in a bin of each region."""
        if attrs["sample_ratio"] > 0:
            return table(rois, lambda r: tirx.const(attrs["sample_ratio"], "int64"))

        def of(r: tirx.PrimExpr) -> tirx.PrimExpr:
            valid = tirx.all(lengths[r] > const(0), lengths[r] <= const(LARGEST))
            return te.ceil(tirx.Select(valid, lengths[r], const(0))).astype("int64")

        return table(rois, of)

    batch = batch_of(rois, data_shape[attrs["layout"].index("N")], dtype)
    begins = [table(rois, bounds(rois, axis, attrs, dtype)[0]) for axis in (0, 1)]
    lengths = [length(axis) for axis in (0, 1)]
    return _Align(batch, *begins, *lengths, *map(count, lengths))


def _taps(
    regions: _Align,
    axis: int,
    r: tirx.PrimExpr,
    which: tirx.PrimExpr,
    sample: tirx.PrimExpr,
    extent: int | tirx.PrimExpr,
) -> list[tuple]:
    """Return position, weight and existence of the two elements around a sample along an axis."""
    begin, length, count = (pair[axis][r] for pair in (regions[1:3], regions[3:5], regions[5:7]))
    dtype = regions.top.dtype

    def const(value: float) -> tirx.PrimExpr:
        return tirx.const(value, dtype)

    at = (begin + which.astype(dtype) * length) + (
        sample.astype(dtype) + const(0.5)
    ) * length / count.astype(dtype)
    extent = tirx.const(1, "int64") * extent
    size = extent.astype(dtype)
    inside = tirx.all(at >= const(-1), at <= size)
    at = tirx.min(tirx.max(tirx.Select(inside, at, const(0)), const(0)), size - const(1))
    first = te.floor(at)
    position = first.astype("int64")
    return [
        (position, const(1) - (at - first), tirx.all(inside, position >= 0)),
        (position + 1, at - first, tirx.all(inside, position + 1 < extent)),
    ]


def _sample(
    data: tirx.Buffer | te.Tensor,
    regions: _Align,
    r: tirx.PrimExpr,
    c: tirx.PrimExpr,
    bin_: Sequence[tirx.PrimExpr],
    samples: Sequence[tirx.PrimExpr],
    at: Sequence[int],
    dtype: str,
) -> tirx.PrimExpr:
    """Interpolate the data at a sample of a bin; 0 outside."""
    batch = regions.batch[r]
    terms = []
    rows, columns = (
        _taps(regions, axis, r, bin_[axis], samples[axis], extent=data.shape[at[2 + axis]])
        for axis in (0, 1)
    )
    for (y, wy, has_y), (x, wx, has_x) in itertools.product(rows, columns):
        value = data[place_of(at, batch, c, y, x)].astype(dtype)
        terms.append(
            tirx.if_then_else(
                tirx.all(batch >= 0, has_y, has_x),
                (wy * wx).astype(dtype) * value,
                tirx.const(0, dtype),
            )
        )
    return functools.reduce(operator.add, terms)


def _store_taps(
    regions: _Align,
    axis: int,
    r: tirx.PrimExpr,
    which: tirx.PrimExpr,
    sample: tirx.PrimExpr,
    extent: int | tirx.PrimExpr,
    positions: tirx.Buffer,
    weights: tirx.Buffer,
    at: Sequence[tirx.PrimExpr],
    offset: int = 0,
) -> None:
    """Store the elements around a sample along an axis: two positions, -1 for none, and weights.

    TVM compiles such long indices and conditions slowly, so statements store their values.
    """
    taps = _taps(regions, axis, r, which, sample, extent=extent)
    for i, (position, weight, exists) in enumerate(taps, start=offset + 2 * axis):
        position = tirx.Select(exists, position, tirx.const(-1, "int64"))
        T.buffer_store(positions, position, [*at, i])
        T.buffer_store(weights, weight.astype(weights.dtype), [*at, i])


def _corners(
    positions: tirx.Buffer | te.Tensor,
    weights: tirx.Buffer | te.Tensor,
    at: Sequence[tirx.PrimExpr],
    offset: int = 0,
) -> Iterator[tuple]:
    """Yield row and column of the four elements around a sample, each with its weight."""
    rows, columns = (
        [(positions[(*at, offset + i)], weights[(*at, offset + i)]) for i in pair]
        for pair in ((0, 1), (2, 3))
    )
    return itertools.product(rows, columns)


def _largest_samples(
    data: te.Tensor, regions: _Align, attrs: dict, dtype: str
) -> tuple[te.Tensor, te.Tensor]:
    """Return positions and weights of the elements around the first of the largest samples of each
    bin.

    Both have the axes region, channel, row and column of the bin, and then eight numbers: the four
    that :func:`_store_taps` writes, and four of the sample visited last. A bin without samples has
    no element (-1).
    """
    at = axes(attrs["layout"], "NCHW")
    shape = bins_shape(data.shape, regions, attrs)

    def body(data: tirx.Buffer, *buffers: tirx.Buffer) -> None:
        count = len(_Align._fields)
        tables, (positions, weights, *best) = buffers[:count], buffers[count:]
        regions = _Align(*tables)
        with tasks(shape[:2], shape[2:]) as (r, c, *bin_):
            place = own = (r, c, *bin_)
            if on_gpu():
                best, own = [T.alloc_buffer([1, 2], dtype, scope="local", layout=None)], (0,)
            (best,) = best
            batch, rows, columns = regions.batch[r], regions.rows[r], regions.columns[r]
            with T.serial(4) as i:
                T.buffer_store(positions, tirx.const(-1, "int64"), [*place, i])
            with loops([rows, columns]) as samples:
                for axis in (0, 1):
                    which, sample, extent = bin_[axis], samples[axis], data.shape[at[2 + axis]]
                    _store_taps(
                        regions,
                        axis,
                        r,
                        which,
                        sample,
                        extent=extent,
                        positions=positions,
                        weights=weights,
                        at=place,
                        offset=4,
                    )
                value = tirx.const(0, dtype)
                for (y, wy), (x, wx) in _corners(positions, weights, place, 4):
                    element = data[place_of(at, batch, c, y, x)].astype(dtype)
                    inside = tirx.all(batch >= 0, y >= 0, x >= 0)
                    value += tirx.if_then_else(inside, wy * wx * element, tirx.const(0, dtype))
                T.buffer_store(best, value, [*own, 1])
                candidate, largest = best[(*own, 1)], best[(*own, 0)]
                is_first = tirx.all(samples[0] == 0, samples[1] == 0)
                with T.If(tirx.any(is_first, candidate > largest)), T.Then():
                    T.buffer_store(best, candidate, [*own, 0])
                    with T.serial(4) as i:
                        for buffer in (positions, weights):
                            T.buffer_store(buffer, buffer[(*place, 4 + i)], [*place, i])

    outputs = [([*shape, 8], "int64"), ([*shape, 8], dtype)]
    if not on_gpu():  # on a GPU, registers hold the largest sample
        outputs.append(([*shape, 2], dtype))
    return tuple(statements(body, [data, *regions], outputs, "largest_samples")[:2])
