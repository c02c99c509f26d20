"""Tensor expressions of pooling over regions of interest and of its gradients.

A region is ``[batch, x1, y1, x2, y2]``. What it holds never becomes an address: a batch index outside the
data, a coordinate that is no number and a region of more than :data:`_LARGEST` elements along an axis
mean that there is nothing to read.

``roi_align`` samples each bin on a regular grid by bilinear interpolation; ``roi_pool`` takes the largest
element of each bin. Neither has a gradient with respect to the regions, as in torchvision.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx, topi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ._util import Shape, accumulation_dtype, axes, cast, is_empty, zeros
from .index import _add, _extern, _loops, _product, _unravel

#: A region that is larger along an axis, in elements of the data, is not looked at.
_LARGEST = 2.0**20


@dataclass(frozen=True)
class _Region:
    """What the bins of a region share. ``read(k)`` is its number ``k``, ``[batch, x1, y1, x2, y2]``."""

    read: Callable[[int], tirx.PrimExpr]
    extents: tuple[tirx.PrimExpr, tirx.PrimExpr, tirx.PrimExpr]  # batch, height, width of the data
    pooled_size: Sequence[int]
    spatial_scale: float
    dtype: str

    def batch(self) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return the batch index, and whether there is such an element."""
        index = te.trunc(self.number(0))
        inside = tirx.all(index >= self.const(0), index < self.extents[0].astype(self.dtype))
        return tirx.Select(inside, index, self.const(0)).astype("int64"), inside

    def number(self, k: int) -> tirx.PrimExpr:
        return self.read(k).astype(self.dtype)

    def const(self, value: float) -> tirx.PrimExpr:
        return tirx.const(value, self.dtype)

    def bounds(self, axis: int) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return where the region begins and ends along an axis (0: height, 1: width)."""
        scale = self.const(self.spatial_scale)
        return self.number(2 - axis) * scale, self.number(4 - axis) * scale


@dataclass(frozen=True)
class _Align(_Region):
    """A region of roi_align."""

    sample_ratio: int
    aligned: bool

    def bin(self, axis: int) -> tirx.PrimExpr:
        """Return the length of a bin."""
        begin, end = self.bounds(axis)
        length = end - begin
        if not self.aligned:
            length = tirx.max(length, self.const(1))
        return length / self.const(self.pooled_size[axis])

    def count(self, axis: int) -> tirx.PrimExpr:
        """Return the number of samples of a bin along an axis."""
        if self.sample_ratio > 0:
            return tirx.const(self.sample_ratio, "int64")
        length = self.bin(axis)
        valid = tirx.all(length > self.const(0), length <= self.const(_LARGEST))
        return te.ceil(tirx.Select(valid, length, self.const(0))).astype("int64")

    def taps(self, axis: int, which: tirx.PrimExpr, sample: tirx.PrimExpr) -> list:
        """Return position, weight and existence of the two elements around a sample along an axis."""
        extent = self.extents[1 + axis]
        size = extent.astype(self.dtype)
        length = self.bin(axis)
        begin, _ = self.bounds(axis)
        at = (begin + which.astype(self.dtype) * length) + (
            sample.astype(self.dtype) + self.const(0.5)
        ) * length / self.count(axis).astype(self.dtype)
        inside = tirx.all(at >= self.const(-1), at <= size)
        at = tirx.Select(inside, at, self.const(0))
        at = tirx.min(tirx.max(at, self.const(0)), size - self.const(1))
        first = te.floor(at)
        behind = at - first
        position = first.astype("int64")
        return [
            (position, self.const(1) - behind, tirx.all(inside, position >= 0)),
            (position + 1, behind, tirx.all(inside, position + 1 < extent)),
        ]


@dataclass(frozen=True)
class _Pool(_Region):
    """A region of roi_pool."""

    def range(self, axis: int, which: tirx.PrimExpr) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        """Return the elements from which and up to which a bin reaches, inside the data."""
        first, last = (
            self._whole(te.floor(bound + self.const(0.5))) for bound in self.bounds(axis)
        )
        length = tirx.max(last - first + 1, 1).astype(self.dtype)
        step = length / self.const(self.pooled_size[axis])
        begin = self._whole(te.floor(which.astype(self.dtype) * step))
        end = self._whole(te.ceil((which + 1).astype(self.dtype) * step))
        extent = self.extents[1 + axis]
        return tuple(tirx.min(tirx.max(first + x, 0), extent) for x in (begin, end))

    def _whole(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """Cast a float to an integer; what is too large or no number to a bound."""
        valid = tirx.all(value > self.const(-_LARGEST), value < self.const(_LARGEST))
        bound = tirx.Select(value > self.const(0), self.const(_LARGEST), self.const(-_LARGEST))
        return tirx.Select(valid, value, bound).astype("int64")


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

    def region_of(r):
        return _align(lambda k: rois(r, k), data.shape, rois.dtype, attrs)

    def element(*index):
        r, c, ph, pw = (index[axis] for axis in at)
        region = region_of(r)
        samples = [te.reduce_axis((0, region.count(axis)), "yx"[axis]) for axis in (0, 1)]
        value = _sample(data, region, r, c, (ph, pw), samples, at, dtype)
        if attrs["mode"] == "max":
            return te.max(value, axis=samples)
        return te.sum(value / _total(region, dtype), axis=samples)

    pooled = te.compute(shape, element, name="roi_align")

    def filled(*index):
        region = region_of(index[at[0]])
        return tirx.if_then_else(
            tirx.all(region.count(0) > 0, region.count(1) > 0),
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
    inputs = [output_grad, rois]
    if attrs["mode"] == "max":
        inputs.append(_largest_sample(data, rois, attrs, dtype))

    def add(out, grad, rois, winner, r, own, bin_):
        region = _align(lambda k: rois[r, k], data.shape, rois.dtype, attrs)
        n, c = own
        value = grad[_place(at, r, c, *bin_)].astype(dtype)

        def spread(samples, value):
            for y, wy, has_y in region.taps(0, bin_[0], samples[0]):
                for x, wx, has_x in region.taps(1, bin_[1], samples[1]):
                    with T.If(tirx.all(has_y, has_x)), T.Then():
                        _add(out, _place(at, n, c, y, x), (wy * wx).astype(dtype) * value)

        if winner is None:
            with _loops([region.count(0), region.count(1)]) as samples:
                spread(samples, value / _total(region, dtype))
        else:
            which = winner[(r, c, *bin_)]
            with T.If(which >= 0), T.Then():
                width = tirx.max(region.count(1), 1)
                spread((tirx.floordiv(which, width), tirx.floormod(which, width)), value)

    return cast(_scatter(add, inputs, data.shape, at, attrs, dtype), data.dtype)


def roi_align_jvp(
    direction: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs
) -> te.Tensor:
    """Derivative of roi_align with ``mode="max"`` along a direction of the data.

    Parameters
    ----------
    direction : te.Tensor
        The direction, of the shape of the data.
    data, rois, **attrs
        As for :func:`roi_align`.

    Returns
    -------
    result : te.Tensor
        The first one of the largest samples of each bin, taken of the direction.
    """
    shape = _pooled_shape(data.shape, rois, attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, direction.dtype)
    at = axes(attrs["layout"], "NCHW")
    dtype = accumulation_dtype(data.dtype, rois.dtype)
    winner = _largest_sample(data, rois, attrs, dtype)

    def element(*index):
        r, c, ph, pw = (index[axis] for axis in at)
        region = _align(lambda k: rois(r, k), data.shape, rois.dtype, attrs)
        which = winner(r, c, ph, pw)
        width = tirx.max(region.count(1), 1)
        samples = tirx.floordiv(tirx.max(which, 0), width), tirx.floormod(tirx.max(which, 0), width)
        value = _sample(direction, region, r, c, (ph, pw), samples, at, dtype)
        return tirx.if_then_else(which >= 0, value, tirx.const(0, dtype)).astype(direction.dtype)

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

    def ranges(index):
        r, _, *bin_ = (index[axis] for axis in at)
        region = _pool(lambda k: rois(r, k), data.shape, rois.dtype, attrs)
        return region, [region.range(axis, which) for axis, which in enumerate(bin_)]

    def element(*index):
        region, ((top, bottom), (left, right)) = ranges(index)
        batch, inside = region.batch()
        y = te.reduce_axis((0, bottom - top), "y")
        x = te.reduce_axis((0, right - left), "x")
        place = _place(at, batch, index[at[1]], top + y, left + x)
        value = tirx.if_then_else(inside, data(*place), tirx.const(0, data.dtype))
        return te.max(value, axis=[y, x])

    pooled = te.compute(shape, element, name="roi_pool")

    def filled(*index):
        _, ((top, bottom), (left, right)) = ranges(index)
        return tirx.if_then_else(
            tirx.all(bottom > top, right > left), pooled(*index), tirx.const(0, data.dtype)
        )

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

    def add(out, grad, rois, winner, r, own, bin_):
        n, c = own
        which = winner[(r, c, *bin_)]
        with T.If(which >= 0), T.Then():
            y, x = _unravel(which, [data.shape[axis] for axis in at[2:]])
            _add(out, _place(at, n, c, y, x), grad[_place(at, r, c, *bin_)].astype(dtype))

    inputs = [output_grad, rois, _largest_element(data, rois, attrs)]
    return cast(_scatter(add, inputs, data.shape, at, attrs, dtype), data.dtype)


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
    winner = _largest_element(data, rois, attrs)

    def element(*index):
        r, c, *bin_ = (index[axis] for axis in at)
        which = winner(r, c, *bin_)
        batch, _ = _pool(lambda k: rois(r, k), data.shape, rois.dtype, attrs).batch()
        y, x = _unravel(which, [data.shape[axis] for axis in at[2:]])
        return tirx.if_then_else(
            which >= 0, direction(*_place(at, batch, c, y, x)), tirx.const(0, direction.dtype)
        )

    return te.compute(shape, element, name="roi_pool_jvp", tag=topi.tag.INJECTIVE)


def _align(read, data_shape: Shape, dtype: str, attrs: dict) -> _Align:
    return _Align(*_region(read, data_shape, dtype, attrs), attrs["sample_ratio"], attrs["aligned"])


def _pool(read, data_shape: Shape, dtype: str, attrs: dict) -> _Pool:
    return _Pool(*_region(read, data_shape, dtype, attrs))


def _region(read, data_shape: Shape, dtype: str, attrs: dict) -> tuple:
    n, _, h, w = (
        tirx.const(1, "int64") * data_shape[axis] for axis in axes(attrs["layout"], "NCHW")
    )
    scale = attrs["spatial_scale"]
    return read, (n, h, w), attrs["pooled_size"], scale, accumulation_dtype(dtype)


def _pooled_shape(data_shape: Shape, rois: te.Tensor, attrs: dict) -> list:
    at = axes(attrs["layout"], "NCHW")
    return _place(at, rois.shape[0], data_shape[at[1]], *attrs["pooled_size"])


def _place(at: Sequence[int], *values) -> tuple:
    """Order values for N, C, H and W by the layout."""
    return tuple(value for _, value in sorted(zip(at, values, strict=True), key=lambda p: p[0]))


def _total(region: _Align, dtype: str) -> tirx.PrimExpr:
    return (region.count(0) * region.count(1)).astype(dtype)


def _sample(data, region: _Align, r, c, bin_, samples, at, dtype) -> tirx.PrimExpr:
    """Interpolate the data, a tensor, at a sample of a bin; 0 outside."""
    batch, inside = region.batch()
    terms = []
    for y, wy, has_y in region.taps(0, bin_[0], samples[0]):
        for x, wx, has_x in region.taps(1, bin_[1], samples[1]):
            value = data[_place(at, batch, c, y, x)].astype(dtype)
            terms.append(
                tirx.if_then_else(
                    tirx.all(inside, has_y, has_x),
                    (wy * wx).astype(dtype) * value,
                    tirx.const(0, dtype),
                )
            )
    return functools.reduce(operator.add, terms)


def _largest_sample(data: te.Tensor, rois: te.Tensor, attrs: dict, dtype: str) -> te.Tensor:
    """Return the number of the first one of the largest samples of each bin, -1 where there is none."""
    at = axes(attrs["layout"], "NCHW")

    def search(data, rois, r, c, bin_, compare):
        region = _align(lambda k: rois[r, k], data.shape, rois.dtype, attrs)
        with _loops([region.count(0), region.count(1)]) as samples:
            value = _sample(data, region, r, c, bin_, samples, at, dtype)
            compare(value, samples[0] * region.count(1) + samples[1])

    return _winner(search, data, rois, attrs, dtype)


def _largest_element(data: te.Tensor, rois: te.Tensor, attrs: dict) -> te.Tensor:
    """Return the number of the first one of the largest elements of each bin, -1 where there is none."""
    at = axes(attrs["layout"], "NCHW")

    def search(data, rois, r, c, bin_, compare):
        region = _pool(lambda k: rois[r, k], data.shape, rois.dtype, attrs)
        batch, inside = region.batch()
        (top, bottom), (left, right) = (region.range(axis, bin_[axis]) for axis in (0, 1))
        with T.If(inside), T.Then(), _loops([bottom - top, right - left]) as (i, j):
            y, x = top + i, left + j
            compare(data[_place(at, batch, c, y, x)], y * data.shape[at[3]] + x)

    return _winner(search, data, rois, attrs, data.dtype)


def _winner(search, data: te.Tensor, rois: te.Tensor, attrs: dict, dtype: str) -> te.Tensor:
    """Return the number of what is largest of what ``search`` finds in each bin; the first of equals."""
    channels = data.shape[axes(attrs["layout"], "NCHW")[1]]
    shape = [rois.shape[0], channels, *attrs["pooled_size"]]

    def generate(ins, outs):
        best, winner = outs
        with IRBuilder() as builder:
            with T.parallel(_product(shape[:2])) as task, _loops(shape[2:]) as bin_:
                r, c = _unravel(task, shape[:2])
                at = [r, c, *bin_]
                T.buffer_store(winner, tirx.const(-1, "int64"), at)

                def compare(value, number):
                    with T.If(tirx.any(winner[tuple(at)] < 0, value > best[tuple(at)])), T.Then():
                        T.buffer_store(best, value, at)
                        T.buffer_store(winner, number, at)

                search(*ins, r, c, bin_, compare)
            return builder.get()

    buffers = [
        tirx.decl_buffer(shape, kind, name, layout=None)
        for kind, name in ((dtype, "best"), ("int64", "winner"))
    ]
    return te.extern(
        [shape, shape],
        [data, rois],
        generate,
        dtype=[dtype, "int64"],
        out_buffers=buffers,
        name="winner",
        tag="winner",
    )[1]


def _scatter(add, inputs, data_shape: Shape, at, attrs: dict, dtype: str) -> te.Tensor:
    """Let ``add`` add what each bin of each region contributes to the gradient of the data."""
    n_extent, c_extent, *spatial = (data_shape[axis] for axis in at)

    def body(grad, rois, *rest):
        *winner, out = rest
        with T.parallel(n_extent * c_extent) as task:
            n, c = _unravel(task, [n_extent, c_extent])
            with _loops(spatial) as place:
                T.buffer_store(out, tirx.const(0, dtype), list(_place(at, n, c, *place)))
            with T.serial(rois.shape[0]) as r:
                region = _pool(lambda k: rois[r, k], data_shape, rois.dtype, attrs)
                batch, inside = region.batch()
                with (
                    T.If(tirx.all(inside, batch == n)),
                    T.Then(),
                    _loops(attrs["pooled_size"]) as bin_,
                ):
                    add(out, grad, rois, winner[0] if winner else None, r, (n, c), bin_)

    return _extern(body, inputs, data_shape, dtype, "roi_backward")
