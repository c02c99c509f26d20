"""Tensor expressions of roi_pool and of its gradients.

The result is the largest element of each bin of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    row_and_column,
    scatter,
    spatial,
    table,
)
from .util import Shape, axes, cast, is_empty, on_gpu, zeros


class _Pool(NamedTuple):
    """Tables of the regions of roi_pool, of shape ``[region]`` and
    ``[region, bin along the axis]``."""

    batch: te.Tensor  # -1 if out of bounds
    top: te.Tensor  # the first row of a bin, inside the data
    bottom: te.Tensor  # the row after the last
    left: te.Tensor
    right: te.Tensor


def roi_pool(data: te.Tensor, rois: te.Tensor, **attrs: Any) -> te.Tensor:
    """Largest element of each bin: ``topi.vision.roi_pool`` without reads outside the data.

    Parameters
    ----------
    data : te.Tensor
        The data.
    rois : te.Tensor
        The regions, of shape ``(number, 5)``.
    **attrs
        ``pooled_size``, ``spatial_scale`` and ``layout``, as ``relax.op.vision.roi_pool`` takes
        them.

    Returns
    -------
    result : te.Tensor
        A tensor of the dtype of the data. An empty bin is 0.
    """
    at = axes(attrs["layout"], "NCHW")
    shape = pooled_shape(data.shape, rois, attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, data.dtype)
    if on_gpu():  # TVM does not schedule a maximum over a window that depends on data
        return roi_pool_jvp(data, data, rois, **attrs)
    regions = _pool(data.shape, rois, attrs)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        r, c, ph, pw = (index[axis] for axis in at)
        y = te.reduce_axis((regions.top[r, ph], regions.bottom[r, ph]), "y")
        x = te.reduce_axis((regions.left[r, pw], regions.right[r, pw]), "x")
        return te.max(data[place_of(at, tirx.max(regions.batch[r], 0), c, y, x)], axis=[y, x])

    pooled = te.compute(shape, element, name="roi_pool")

    def filled(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        r, _, ph, pw = (index[axis] for axis in at)
        filled = tirx.all(
            regions.batch[r] >= 0,
            regions.bottom[r, ph] > regions.top[r, ph],
            regions.right[r, pw] > regions.left[r, pw],
        )
        return tirx.if_then_else(filled, pooled(*index), tirx.const(0, data.dtype))

    return te.compute(shape, filled, name="roi_pool_filled", tag=topi.tag.INJECTIVE)


def roi_pool_backward_data(
    output_grad: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs: Any
) -> te.Tensor:
    """Gradient of roi_pool with respect to the data: the first of the largest elements gets it.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    data, rois, **attrs
        As for :func:`roi_pool`.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the data; half precision is accumulated in float32,
        in an order that is always the same.
    """
    if is_empty(output_grad.shape) or is_empty(data.shape):
        return zeros(data.shape, data.dtype)
    at = axes(attrs["layout"], "NCHW")
    dtype = accumulation_dtype(data.dtype)
    regions = _pool(data.shape, rois, attrs)
    width = spatial(data.shape, at)[1]
    inputs = [output_grad, _largest_element(data, regions, attrs)]

    def add_bin(
        plane: Plane,
        grad: tirx.Buffer,
        winner: tirx.Buffer,
        _: _Pool,
        r: tirx.PrimExpr,
        c: tirx.PrimExpr,
        bin_: Sequence[tirx.PrimExpr],
    ) -> None:
        which = winner[(r, c, *bin_)]
        with T.If(which >= 0), T.Then():
            y, x = row_and_column(which, width)
            plane.add(y, x, grad[place_of(at, r, c, *bin_)].astype(dtype))

    return cast(scatter(add_bin, inputs, regions, data.shape, attrs, dtype=dtype), data.dtype)


def roi_pool_jvp(direction: te.Tensor, data: te.Tensor, rois: te.Tensor, **attrs: Any) -> te.Tensor:
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
        The direction at the first of the largest elements of each bin.
    """
    shape = pooled_shape(data.shape, rois, attrs)
    if is_empty(shape) or is_empty(data.shape):
        return zeros(shape, direction.dtype)
    at = axes(attrs["layout"], "NCHW")
    regions = _pool(data.shape, rois, attrs)
    winner = _largest_element(data, regions, attrs)
    width = spatial(data.shape, at)[1]

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        r, c, *bin_ = (index[axis] for axis in at)
        which = winner[(r, c, *bin_)]
        y, x = row_and_column(tirx.max(which, 0), width)
        value = direction[place_of(at, regions.batch[r], c, y, x)]
        return tirx.if_then_else(which >= 0, value, tirx.const(0, direction.dtype))

    return te.compute(shape, element, name="roi_pool_jvp", tag=topi.tag.INJECTIVE)


def _pool(data_shape: Shape, rois: te.Tensor, attrs: dict) -> _Pool:
    """Compute the tables of roi_pool."""
    dtype = accumulation_dtype(rois.dtype)

    def const(value: float) -> tirx.PrimExpr:
        return tirx.const(value, dtype)

    def whole(value: tirx.PrimExpr) -> tirx.PrimExpr:
        """Cast a float to an integer; a value that is too large, or NaN, becomes a bound."""
        valid = tirx.all(value > const(-LARGEST), value < const(LARGEST))
        bound = tirx.Select(value > const(0), const(LARGEST), const(-LARGEST))
        return tirx.Select(valid, value, bound).astype("int64")

    def edges(axis: int, extent: int | tirx.PrimExpr) -> tuple[te.Tensor, te.Tensor]:
        """Return the tables of the begin and the end of each bin."""

        def rounded_bound(bound: Callable[..., tirx.PrimExpr]) -> te.Tensor:
            return table(rois, lambda r: whole(te.floor(bound(r) + const(0.5))))

        first, last = map(rounded_bound, bounds(rois, axis, attrs, dtype))
        bins = attrs["pooled_size"][axis]

        def edge(
            r: tirx.PrimExpr, number: tirx.PrimExpr, rounded: Callable[..., tirx.PrimExpr]
        ) -> tirx.PrimExpr:
            length = tirx.max(last[r] - first[r] + 1, 1).astype(dtype)
            offset = whole(rounded(number.astype(dtype) * (length / const(bins))))
            return tirx.max(tirx.min(first[r] + offset, extent), 0)

        shape = (rois.shape[0], bins)
        return (
            te.compute(shape, lambda r, i: edge(r, i, te.floor), name="edge"),
            te.compute(shape, lambda r, i: edge(r, i + 1, te.ceil), name="edge"),
        )

    at = axes(attrs["layout"], "NCHW")
    height, width = spatial(data_shape, at)
    return _Pool(batch_of(rois, data_shape[at[0]], dtype), *edges(0, height), *edges(1, width))


def _largest_element(data: te.Tensor, regions: _Pool, attrs: dict) -> te.Tensor:
    """Return the number of the first of the largest elements of each bin, -1 for an empty bin."""
    at = axes(attrs["layout"], "NCHW")
    shape = bins_shape(data.shape, regions, attrs)
    width = spatial(data.shape, at)[1]

    def body(data: tirx.Buffer, *buffers: tirx.Buffer) -> None:
        count = len(_Pool._fields)
        tables, (winner, *best) = buffers[:count], buffers[count:]
        regions = _Pool(*tables)
        with tasks(shape[:2], shape[2:]) as (r, c, ph, pw):
            own: tuple[tirx.PrimExpr | int, ...]
            place = own = (r, c, ph, pw)
            if on_gpu():
                best, own = [T.alloc_buffer([1], data.dtype, scope="local", layout=None)], (0,)
            (best,) = best
            top, left, batch = regions.top[r, ph], regions.left[r, pw], regions.batch[r]
            extents = [regions.bottom[r, ph] - top, regions.right[r, pw] - left]
            T.buffer_store(winner, tirx.const(-1, "int64"), place)
            with T.If(batch >= 0), T.Then(), loops(extents) as (i, j):
                value = data[place_of(at, batch, c, top + i, left + j)]
                with T.If(tirx.any(winner[place] < 0, value > best[own])), T.Then():
                    T.buffer_store(best, value, own)
                    T.buffer_store(winner, (top + i) * width + left + j, place)

    outputs = [(shape, "int64")]
    if not on_gpu():  # on a GPU, a register holds the largest element
        outputs.append((shape, data.dtype))
    return statements(body, [data, *regions], outputs, "largest_element")[0]
