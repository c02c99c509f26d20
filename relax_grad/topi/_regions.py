"""Common parts of pooling over regions of interest.

A region is ``[batch, x1, y1, x2, y2]``. Its values never become addresses directly. Nothing is read
for a batch index outside the data, a coordinate that is NaN, or a region of more than
:data:`LARGEST` elements along an axis. Values that only depend on the region are computed once,
into tables.

Neither operator has a gradient with respect to the regions, as in torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from ._loops import Chunks, add, loops, statements
from .util import Shape, axes, on_gpu

#: The largest extent of a region along an axis, in elements of the data; a larger region is
#: ignored.
LARGEST = 2.0**20


class Plane(NamedTuple):
    """A channel of a batch element: a task owns the whole channel, or on a GPU some of its rows."""

    add: Callable  # (y, x, value): adds to an element if the task owns it
    if_owned: Callable  # (*y): runs statements if the task owns one of the rows


def bounds(rois: te.Tensor, axis: int, attrs: dict, dtype: str) -> tuple[Callable, Callable]:
    """Return functions from a region to its begin and its end along an axis (0: height, 1:
    width)."""
    scale = tirx.const(attrs["spatial_scale"], dtype)

    def bound(column: int) -> Callable:
        return lambda r: rois(r, column).astype(dtype) * scale

    return bound(2 - axis), bound(4 - axis)


def batch_of(rois: te.Tensor, extent: tirx.PrimExpr, dtype: str) -> te.Tensor:
    """Return the table of the batch index of each region, or -1 if it is out of bounds."""

    def of(r: tirx.PrimExpr) -> tirx.PrimExpr:
        index = te.trunc(rois(r, 0).astype(dtype))
        limit = (tirx.const(1, "int64") * extent).astype(dtype)
        inside = tirx.all(index >= tirx.const(0, dtype), index < limit)
        batch = tirx.Select(inside, index, tirx.const(0, dtype)).astype("int64")
        return tirx.Select(inside, batch, tirx.const(-1, "int64"))

    return table(rois, of)


def table(rois: te.Tensor, of: Callable) -> te.Tensor:
    """Compute a function of each region once: the result is indexed by region."""
    return te.compute((rois.shape[0],), lambda r: of(r), name="region")


def scatter(
    add_bin: Callable[..., None],
    inputs: Sequence[te.Tensor],
    regions: Any,
    data_shape: Shape,
    attrs: dict,
    dtype: str,
    scratch: bool = False,
) -> te.Tensor:
    """Return the gradient of the data, to which ``add_bin`` adds the contribution of each bin of
    each region.

    ``add_bin`` takes the :class:`Plane` to add to, the buffers of the inputs, the tables, region,
    channel and bin. With ``scratch`` it also takes buffers for positions and weights, of four
    numbers each for a task, and the task's index into them.
    """
    at = axes(attrs["layout"], "NCHW")
    n_extent, c_extent, height, width = (data_shape[axis] for axis in at)
    count = regions.batch.shape[0]
    kind = type(regions)
    rows = Chunks((), [height], [n_extent, c_extent])

    def body(*buffers: tirx.Buffer) -> None:
        ins, tables = buffers[: len(inputs)], buffers[len(inputs) :][: len(regions)]
        out, *rest = buffers[len(inputs) + len(regions) :]
        tables = kind(*tables)
        with rows.tasks() as ((n, c), own):
            if scratch and on_gpu():  # each thread has its own scratch, in registers
                rest = [
                    T.alloc_buffer([1, 4], own_dtype, scope="local", layout=None)
                    for own_dtype in ("int64", dtype)
                ]
            with rows.own(own) as row, loops([width]) as column:
                T.buffer_store(out, tirx.const(0, dtype), list(place_of(at, n, c, *row, *column)))

            def add_to(y: tirx.PrimExpr, x: tirx.PrimExpr, value: tirx.PrimExpr) -> None:
                with rows.if_owned(own, [y]):
                    add(out, place_of(at, n, c, y, x), value)

            plane = Plane(add_to, lambda *y: rows.if_owned(own, *([i] for i in y)))
            with (
                T.serial(count) as r,
                T.If(tables.batch[r] == n),
                T.Then(),
                loops(attrs["pooled_size"]) as bin_,
            ):
                # TVM treats a read at a constant index as loop-invariant.
                slot = tirx.bitwise_and(r, 0) if on_gpu() else n * c_extent + c
                add_bin(plane, *ins, tables, r, c, bin_, *rest, *([(slot,)] if scratch else []))

    outputs = [(data_shape, dtype)]
    if scratch and not on_gpu():
        outputs += [([n_extent * c_extent, 4], own) for own in ("int64", dtype)]
    return statements(body, [*inputs, *regions], outputs, "roi_backward")[0]


def row_and_column(
    number: tirx.PrimExpr, columns: tirx.PrimExpr
) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """Return row and column of an element of a row-major plane, by its number."""
    width = tirx.max(columns, 1)
    return tirx.floordiv(number, width), tirx.floormod(number, width)


def bins_shape(data_shape: Shape, regions: Any, attrs: dict) -> list:
    """Return the shape of the bins: regions, channels, rows and columns, whatever the layout."""
    channels = data_shape[attrs["layout"].index("C")]
    return [regions.batch.shape[0], channels, *attrs["pooled_size"]]


def pooled_shape(data_shape: Shape, rois: te.Tensor, attrs: dict) -> tuple:
    """Return the shape of the pooled result, in the layout of the data."""
    at = axes(attrs["layout"], "NCHW")
    return place_of(at, rois.shape[0], data_shape[at[1]], *attrs["pooled_size"])


def spatial(data_shape: Shape, at: Sequence[int]) -> list[tirx.PrimExpr]:
    """Return the height and the width of the data, as int64."""
    return [tirx.const(1, "int64") * data_shape[axis] for axis in at[2:]]


def place_of(at: Sequence[int], *values: Any) -> tuple:
    """Reorder values for N, C, H and W to the order of the layout."""
    return tuple(value for _, value in sorted(zip(at, values, strict=True), key=lambda p: p[0]))
