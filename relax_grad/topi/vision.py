"""Tensor expressions of pooling over regions of interest and of its gradients.

A region is ``[batch, x1, y1, x2, y2]``. What it holds never becomes an address: a batch index outside the
data, a coordinate that is no number and a region of more than :data:`_LARGEST` elements along an axis
mean that there is nothing to read. What depends on the region alone is computed once, into tables.

``roi_align`` samples each bin on a regular grid by bilinear interpolation; ``roi_pool`` takes the largest
element of each bin. Neither has a gradient with respect to the regions, as in torchvision.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tvm import te, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ._util import Shape, accumulation_dtype, axes, cast, is_empty, zeros
from .index import _add, _loops, _product, _unravel

#: A region that is larger along an axis, in elements of the data, is not looked at.
_LARGEST = 2.0**20


class _Align(NamedTuple):
    """Tables of the regions of roi_align, of shape ``[region]``: tensors, or buffers in statements."""

    batch: te.Tensor  # -1 where there is no such element
    top: te.Tensor
    left: te.Tensor
    bin_height: te.Tensor
    bin_width: te.Tensor
    rows: te.Tensor  # of samples in a bin
    columns: te.Tensor


class _Pool(NamedTuple):
    """Tables of the regions of roi_pool, of shape ``[region]`` and ``[region, bin along the axis]``."""

    batch: te.Tensor  # -1 where there is no such element
    top: te.Tensor  # the first row of a bin, inside the data
    bottom: te.Tensor  # the row behind the last
    left: te.Tensor
    right: te.Tensor


def roi_align(data: te.Tensor, rois: te.Tensor, **attrs) -> te.Tensor:
    """Average or largest of samples of each bin: ``topi.vision.roi_align`` that reads nothing outside.

    Parameters
    ----------
    data : te.Tensor
        The data.
    rois : te.Tensor
        The regions, of shape ``(number, 5)``.
    **attrs
        ``pooled_size``, ``spatial_scale``, ``sample_ratio``, ``aligned``, ``layout`` and ``mode``, as
        ``relax.op.vision.roi_align`` takes them.

    Returns
    -------
    result : te.Tensor
        A tensor of the dtype of the data; half precision is computed in float32. A bin without samples
        is 0.
    """
    at = axes(attrs["layout"], "NCHW")
    shape = _pooled_shape(data.shape, rois, attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, data.dtype)
    dtype = accumulation_dtype(data.dtype, rois.dtype)
    regions = _align(data.shape, rois, attrs)

    def element(*index):
        r, c, *bin_ = (index[axis] for axis in at)
        rows, columns = regions.rows[r], regions.columns[r]
        samples = te.reduce_axis((0, rows), "row"), te.reduce_axis((0, columns), "column")
        value = _sample(data, regions, r, c, bin_, samples, at, dtype)
        if attrs["mode"] == "max":
            return te.max(value, axis=samples)
        return te.sum(value / (rows * columns).astype(dtype), axis=samples)

    pooled = te.compute(shape, element, name="roi_align")

    def filled(*index):
        r = index[at[0]]
        return tirx.if_then_else(
            tirx.all(regions.rows[r] > 0, regions.columns[r] > 0),
            pooled(*index),
            tirx.const(0, dtype),
        ).astype(data.dtype)

    return te.compute(shape, filled, name="roi_align_filled", tag=topi.tag.INJECTIVE)


def roi_align_backward_data(
    output_grad: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs
) -> te.Tensor:
    """Gradient of roi_align with respect to the data: each sample adds to the elements around it.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    data, rois, **attrs
        As for :func:`roi_align`. Of the data, only ``mode="max"`` reads more than the shape: the gradient
        goes to the first one of the largest samples.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the data; half precision is accumulated in float32. A
        parallel task owns a channel of an element of the batch, so that the order of the sums is always
        the same.
    """
    if is_empty(output_grad.shape) or is_empty(data.shape):
        return zeros(data.shape, data.dtype)
    at = axes(attrs["layout"], "NCHW")
    dtype = accumulation_dtype(data.dtype, rois.dtype)
    regions = _align(data.shape, rois, attrs)
    if attrs["mode"] == "max":
        positions, weights = _largest_samples(data, regions, attrs, dtype)

        def add_largest(out, grad, positions, weights, _, r, n, c, bin_):
            value = grad[_place(at, r, c, *bin_)].astype(dtype)
            for (y, wy), (x, wx) in _corners(positions, weights, (r, c, *bin_)):
                with T.If(tirx.all(y >= 0, x >= 0)), T.Then():
                    _add(out, _place(at, n, c, y, x), wy * wx * value)

        inputs = [output_grad, positions, weights]
        total = _scatter(add_largest, inputs, regions, data.shape, attrs, dtype)
        return cast(total, data.dtype)

    def add(out, grad, regions, r, n, c, bin_, positions, weights):
        rows, columns = regions.rows[r], regions.columns[r]
        value = grad[_place(at, r, c, *bin_)].astype(dtype) / (rows * columns).astype(dtype)
        scratch = (n * data.shape[at[1]] + c,)

        def store(axis, sample):
            which, extent = bin_[axis], data.shape[at[2 + axis]]
            _store_taps(regions, axis, r, which, sample, extent, positions, weights, scratch)

        with T.serial(rows) as i:
            store(0, i)
            with T.serial(columns) as j:
                store(1, j)
                for (y, wy), (x, wx) in _corners(positions, weights, scratch):
                    with T.If(tirx.all(y >= 0, x >= 0)), T.Then():
                        _add(out, _place(at, n, c, y, x), wy * wx * value)

    total = _scatter(add, [output_grad], regions, data.shape, attrs, dtype, scratch=True)
    return cast(total, data.dtype)


def roi_align_jvp(direction: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs) -> te.Tensor:
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
        With ``mode="max"``, the first one of the largest samples of each bin, taken of the direction; else
        ``roi_align(direction, rois)``.
    """
    shape = _pooled_shape(data.shape, rois, attrs)
    if attrs["mode"] != "max":
        return roi_align(direction, rois, **attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, direction.dtype)
    at = axes(attrs["layout"], "NCHW")
    dtype = accumulation_dtype(data.dtype, rois.dtype)
    regions = _align(data.shape, rois, attrs)
    positions, weights = _largest_samples(data, regions, attrs, dtype)

    def element(*index):
        r, c, *bin_ = (index[axis] for axis in at)
        batch, total = regions.batch[r], tirx.const(0, dtype)
        for (y, wy), (x, wx) in _corners(positions, weights, (r, c, *bin_)):
            value = direction[_place(at, batch, c, y, x)].astype(dtype)
            inside = tirx.all(batch >= 0, y >= 0, x >= 0)
            total += tirx.if_then_else(inside, wy * wx * value, tirx.const(0, dtype))
        return total.astype(direction.dtype)

    return te.compute(shape, element, name="roi_align_jvp", tag=topi.tag.INJECTIVE)


def roi_pool(data: te.Tensor, rois: te.Tensor, **attrs) -> te.Tensor:
    """Largest element of each bin: ``topi.vision.roi_pool`` that reads nothing outside.

    Parameters
    ----------
    data : te.Tensor
        The data.
    rois : te.Tensor
        The regions, of shape ``(number, 5)``.
    **attrs
        ``pooled_size``, ``spatial_scale`` and ``layout``, as ``relax.op.vision.roi_pool`` takes them.

    Returns
    -------
    result : te.Tensor
        A tensor of the dtype of the data. An empty bin is 0.
    """
    at = axes(attrs["layout"], "NCHW")
    shape = _pooled_shape(data.shape, rois, attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, data.dtype)
    regions = _pool(data.shape, rois, attrs)

    def element(*index):
        r, c, ph, pw = (index[axis] for axis in at)
        y = te.reduce_axis((regions.top[r, ph], regions.bottom[r, ph]), "y")
        x = te.reduce_axis((regions.left[r, pw], regions.right[r, pw]), "x")
        return te.max(data[_place(at, tirx.max(regions.batch[r], 0), c, y, x)], axis=[y, x])

    pooled = te.compute(shape, element, name="roi_pool")

    def filled(*index):
        r, _, ph, pw = (index[axis] for axis in at)
        filled = tirx.all(
            regions.batch[r] >= 0,
            regions.bottom[r, ph] > regions.top[r, ph],
            regions.right[r, pw] > regions.left[r, pw],
        )
        return tirx.if_then_else(filled, pooled(*index), tirx.const(0, data.dtype))

    return te.compute(shape, filled, name="roi_pool_filled", tag=topi.tag.INJECTIVE)


def roi_pool_backward_data(
    output_grad: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs
) -> te.Tensor:
    """Gradient of roi_pool with respect to the data: the first one of the largest elements gets it.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    data, rois, **attrs
        As for :func:`roi_pool`.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the data; half precision is accumulated in float32, in an
        order that is always the same.
    """
    if is_empty(output_grad.shape) or is_empty(data.shape):
        return zeros(data.shape, data.dtype)
    at = axes(attrs["layout"], "NCHW")
    dtype = accumulation_dtype(data.dtype)
    regions = _pool(data.shape, rois, attrs)
    width = _spatial(data.shape, at)[1]
    inputs = [output_grad, _largest_element(data, regions, attrs)]

    def add(out, grad, winner, _, r, n, c, bin_):
        which = winner[(r, c, *bin_)]
        with T.If(which >= 0), T.Then():
            y, x = _row_and_column(which, width)
            _add(out, _place(at, n, c, y, x), grad[_place(at, r, c, *bin_)].astype(dtype))

    return cast(_scatter(add, inputs, regions, data.shape, attrs, dtype), data.dtype)


def roi_pool_jvp(direction: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs) -> te.Tensor:
    """Derivative of roi_pool along a direction of the data.

    Parameters
    ----------
    direction : te.Tensor
        The direction, of the shape of the data.
    data, rois, **attrs
        As for :func:`roi_pool`.

    Returns
    -------
    result : te.Tensor
        The first one of the largest elements of each bin, taken of the direction.
    """
    shape = _pooled_shape(data.shape, rois, attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, direction.dtype)
    at = axes(attrs["layout"], "NCHW")
    regions = _pool(data.shape, rois, attrs)
    winner = _largest_element(data, regions, attrs)
    width = _spatial(data.shape, at)[1]

    def element(*index):
        r, c, *bin_ = (index[axis] for axis in at)
        which = winner[(r, c, *bin_)]
        y, x = _row_and_column(tirx.max(which, 0), width)
        value = direction[_place(at, regions.batch[r], c, y, x)]
        return tirx.if_then_else(which >= 0, value, tirx.const(0, direction.dtype))

    return te.compute(shape, element, name="roi_pool_jvp", tag=topi.tag.INJECTIVE)


def _align(data_shape: Shape, rois: te.Tensor, attrs: dict) -> _Align:
    """Compute the tables of roi_align."""
    dtype = accumulation_dtype(rois.dtype)

    def const(value):
        return tirx.const(value, dtype)

    def length(axis):
        """Return a function from a region to the length of its bins."""
        begin, end = _bounds(rois, axis, attrs, dtype)

        def of(r):
            total = end(r) - begin(r)
            if not attrs["aligned"]:
                total = tirx.max(total, const(1))
            return total / const(attrs["pooled_size"][axis])

        return _table(rois, of)

    def count(lengths):
        """Return a function from a region to the number of samples of its bins."""
        if attrs["sample_ratio"] > 0:
            return _table(rois, lambda r: tirx.const(attrs["sample_ratio"], "int64"))

        def of(r):
            valid = tirx.all(lengths[r] > const(0), lengths[r] <= const(_LARGEST))
            return te.ceil(tirx.Select(valid, lengths[r], const(0))).astype("int64")

        return _table(rois, of)

    batch = _batch(rois, data_shape[attrs["layout"].index("N")], dtype)
    begins = [_table(rois, _bounds(rois, axis, attrs, dtype)[0]) for axis in (0, 1)]
    lengths = [length(axis) for axis in (0, 1)]
    return _Align(batch, *begins, *lengths, *map(count, lengths))


def _pool(data_shape: Shape, rois: te.Tensor, attrs: dict) -> _Pool:
    """Compute the tables of roi_pool."""
    dtype = accumulation_dtype(rois.dtype)

    def const(value):
        return tirx.const(value, dtype)

    def whole(value):
        """Cast a float to an integer; what is too large or no number to a bound."""
        valid = tirx.all(value > const(-_LARGEST), value < const(_LARGEST))
        bound = tirx.Select(value > const(0), const(_LARGEST), const(-_LARGEST))
        return tirx.Select(valid, value, bound).astype("int64")

    def edges(axis, extent):
        """Return the tables of the elements at which bins begin and end."""
        bounds = _bounds(rois, axis, attrs, dtype)

        def rounded_bound(bound):
            return _table(rois, lambda r: whole(te.floor(bound(r) + const(0.5))))

        first, last = map(rounded_bound, bounds)
        bins = attrs["pooled_size"][axis]

        def edge(r, number, rounded):
            length = tirx.max(last[r] - first[r] + 1, 1).astype(dtype)
            offset = whole(rounded(number.astype(dtype) * (length / const(bins))))
            return tirx.max(tirx.min(first[r] + offset, extent), 0)

        shape = (rois.shape[0], bins)
        return (
            te.compute(shape, lambda r, i: edge(r, i, te.floor), name="edge"),
            te.compute(shape, lambda r, i: edge(r, i + 1, te.ceil), name="edge"),
        )

    at = axes(attrs["layout"], "NCHW")
    height, width = _spatial(data_shape, at)
    return _Pool(_batch(rois, data_shape[at[0]], dtype), *edges(0, height), *edges(1, width))


def _bounds(rois: te.Tensor, axis: int, attrs: dict, dtype: str) -> tuple[Callable, Callable]:
    """Return functions from a region to where it begins and ends along an axis (0: height, 1: width)."""
    scale = tirx.const(attrs["spatial_scale"], dtype)
    return tuple(
        lambda r, column=column: rois(r, column).astype(dtype) * scale
        for column in (2 - axis, 4 - axis)
    )


def _batch(rois: te.Tensor, extent: tirx.PrimExpr, dtype: str) -> te.Tensor:
    """Return the table of the element of the batch that a region lies in, or -1."""

    def of(r):
        index = te.trunc(rois(r, 0).astype(dtype))
        limit = (tirx.const(1, "int64") * extent).astype(dtype)
        inside = tirx.all(index >= tirx.const(0, dtype), index < limit)
        found = tirx.Select(inside, index, tirx.const(0, dtype)).astype("int64")
        return tirx.Select(inside, found, tirx.const(-1, "int64"))

    return _table(rois, of)


def _table(rois: te.Tensor, of: Callable) -> te.Tensor:
    return te.compute((rois.shape[0],), lambda r: of(r), name="region")


def _taps(regions: _Align, axis: int, r, which, sample, extent) -> list[tuple]:
    """Return position, weight and existence of the two elements around a sample along an axis."""
    begin, length, count = (pair[axis][r] for pair in (regions[1:3], regions[3:5], regions[5:7]))
    dtype = regions.top.dtype

    def const(value):
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


def _sample(data, regions: _Align, r, c, bin_, samples, at, dtype) -> tirx.PrimExpr:
    """Interpolate the data at a sample of a bin; 0 outside."""
    batch = regions.batch[r]
    terms = []
    rows, columns = (
        _taps(regions, axis, r, bin_[axis], samples[axis], data.shape[at[2 + axis]])
        for axis in (0, 1)
    )
    for (y, wy, has_y), (x, wx, has_x) in itertools.product(rows, columns):
        value = data[_place(at, batch, c, y, x)].astype(dtype)
        terms.append(
            tirx.if_then_else(
                tirx.all(batch >= 0, has_y, has_x),
                (wy * wx).astype(dtype) * value,
                tirx.const(0, dtype),
            )
        )
    return functools.reduce(operator.add, terms)


def _store_taps(
    regions: _Align, axis: int, r, which, sample, extent, positions, weights, at, offset: int = 0
) -> None:
    """Store the elements around a sample along an axis: two positions, -1 for none, and weights.

    TVM is slow to compile indices and conditions as long as these, so statements write them down.
    """
    taps = _taps(regions, axis, r, which, sample, extent)
    for i, (position, weight, exists) in enumerate(taps, start=offset + 2 * axis):
        position = tirx.Select(exists, position, tirx.const(-1, "int64"))
        T.buffer_store(positions, position, [*at, i])
        T.buffer_store(weights, weight.astype(weights.dtype), [*at, i])


def _corners(positions, weights, at, offset: int = 0) -> Iterator[tuple]:
    """Yield row and column of the four elements around a sample, each with its weight."""
    rows, columns = (
        [(positions[(*at, offset + i)], weights[(*at, offset + i)]) for i in pair]
        for pair in ((0, 1), (2, 3))
    )
    return itertools.product(rows, columns)


def _largest_samples(
    data: te.Tensor, regions: _Align, attrs: dict, dtype: str
) -> tuple[te.Tensor, te.Tensor]:
    """Return positions and weights of the elements around the first one of the largest samples of bins.

    Both have the axes region, channel, row and column of the bin, and four numbers as
    :func:`_store_taps` writes them, and four more of the last sample. Without samples there is no element.
    """
    at = axes(attrs["layout"], "NCHW")
    shape = _bins(data.shape, regions, attrs)

    def body(data, *buffers):
        *tables, positions, weights, best = buffers
        regions = _Align(*tables)
        with T.parallel(_product(shape[:2])) as task, _loops(shape[2:]) as bin_:
            r, c = _unravel(task, shape[:2])
            place = (r, c, *bin_)
            batch, rows, columns = regions.batch[r], regions.rows[r], regions.columns[r]
            with T.serial(4) as i:
                T.buffer_store(positions, tirx.const(-1, "int64"), [*place, i])
            with _loops([rows, columns]) as samples:
                for axis in (0, 1):
                    which, sample, extent = bin_[axis], samples[axis], data.shape[at[2 + axis]]
                    _store_taps(
                        regions, axis, r, which, sample, extent, positions, weights, place, 4
                    )
                value = tirx.const(0, dtype)
                for (y, wy), (x, wx) in _corners(positions, weights, place, 4):
                    element = data[_place(at, batch, c, y, x)].astype(dtype)
                    inside = tirx.all(batch >= 0, y >= 0, x >= 0)
                    value += tirx.if_then_else(inside, wy * wx * element, tirx.const(0, dtype))
                T.buffer_store(best, value, [*place, 1])
                found, largest = best[(*place, 1)], best[(*place, 0)]
                is_first = tirx.all(samples[0] == 0, samples[1] == 0)
                with T.If(tirx.any(is_first, found > largest)), T.Then():
                    T.buffer_store(best, found, [*place, 0])
                    with T.serial(4) as i:
                        for buffer in (positions, weights):
                            T.buffer_store(buffer, buffer[(*place, 4 + i)], [*place, i])

    outputs = [([*shape, 8], "int64"), ([*shape, 8], dtype), ([*shape, 2], dtype)]
    return tuple(_statements(body, [data, *regions], outputs, "largest_samples")[:2])


def _largest_element(data: te.Tensor, regions: _Pool, attrs: dict) -> te.Tensor:
    """Return the number of the first one of the largest elements of each bin, -1 where there is none."""
    at = axes(attrs["layout"], "NCHW")
    shape = _bins(data.shape, regions, attrs)
    width = _spatial(data.shape, at)[1]

    def body(data, *buffers):
        *tables, winner, best = buffers
        regions = _Pool(*tables)
        with T.parallel(_product(shape[:2])) as task, _loops(shape[2:]) as (ph, pw):
            r, c = _unravel(task, shape[:2])
            place = (r, c, ph, pw)
            top, left, batch = regions.top[r, ph], regions.left[r, pw], regions.batch[r]
            extents = [regions.bottom[r, ph] - top, regions.right[r, pw] - left]
            T.buffer_store(winner, tirx.const(-1, "int64"), place)
            with T.If(batch >= 0), T.Then(), _loops(extents) as (i, j):
                value = data[_place(at, batch, c, top + i, left + j)]
                with T.If(tirx.any(winner[place] < 0, value > best[place])), T.Then():
                    T.buffer_store(best, value, place)
                    T.buffer_store(winner, (top + i) * width + left + j, place)

    outputs = [(shape, "int64"), (shape, data.dtype)]
    return _statements(body, [data, *regions], outputs, "largest_element")[0]


def _scatter(
    add, inputs, regions, data_shape: Shape, attrs: dict, dtype: str, scratch: bool = False
) -> te.Tensor:
    """Let ``add`` add what each bin of each region contributes to the gradient of the data.

    It takes the buffers of the result and of the inputs, the tables, region, batch element, channel and
    bin, and with ``scratch`` buffers for positions and weights, with four numbers for each task.
    """
    at = axes(attrs["layout"], "NCHW")
    n_extent, c_extent, *spatial = (data_shape[axis] for axis in at)
    count = regions.batch.shape[0]
    kind = type(regions)

    def body(*buffers):
        ins, tables = buffers[: len(inputs)], buffers[len(inputs) :][: len(regions)]
        out, *rest = buffers[len(inputs) + len(regions) :]
        tables = kind(*tables)
        with T.parallel(_product([n_extent, c_extent])) as task:
            n, c = _unravel(task, [n_extent, c_extent])
            with _loops(spatial) as place:
                T.buffer_store(out, tirx.const(0, dtype), list(_place(at, n, c, *place)))
            with (
                T.serial(count) as r,
                T.If(tables.batch[r] == n),
                T.Then(),
                _loops(attrs["pooled_size"]) as bin_,
            ):
                add(out, *ins, tables, r, n, c, bin_, *rest)

    outputs = [(data_shape, dtype)]
    if scratch:
        outputs += [([n_extent * c_extent, 4], own) for own in ("int64", dtype)]
    return _statements(body, [*inputs, *regions], outputs, "roi_backward")[0]


def _statements(body, inputs, outputs, name: str) -> list[te.Tensor]:
    """Make tensors of statements: ``body`` takes the buffers of the inputs and of the outputs."""

    def generate(ins, outs):
        with IRBuilder() as builder:
            body(*ins, *outs)
            return builder.get()

    buffers = [
        tirx.decl_buffer(shape, dtype, f"out{i}", layout=None)
        for i, (shape, dtype) in enumerate(outputs)
    ]
    result = te.extern(
        [shape for shape, _ in outputs],
        inputs,
        generate,
        dtype=[dtype for _, dtype in outputs],
        out_buffers=buffers,
        name=name,
        tag=name,
    )
    return [result] if isinstance(result, te.Tensor) else list(result)


def _row_and_column(number, columns) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    width = tirx.max(columns, 1)
    return tirx.floordiv(number, width), tirx.floormod(number, width)


def _bins(data_shape: Shape, regions, attrs: dict) -> list:
    channels = data_shape[attrs["layout"].index("C")]
    return [regions.batch.shape[0], channels, *attrs["pooled_size"]]


def _pooled_shape(data_shape: Shape, rois: te.Tensor, attrs: dict) -> tuple:
    at = axes(attrs["layout"], "NCHW")
    return _place(at, rois.shape[0], data_shape[at[1]], *attrs["pooled_size"])


def _spatial(data_shape: Shape, at: Sequence[int]) -> list[tirx.PrimExpr]:
    return [tirx.const(1, "int64") * data_shape[axis] for axis in at[2:]]


def _place(at: Sequence[int], *values) -> tuple:
    """Order values for N, C, H and W by the layout."""
    return tuple(value for _, value in sorted(zip(at, values, strict=True), key=lambda p: p[0]))
