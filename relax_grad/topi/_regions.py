"""What pooling over regions of interest has in common.

A region is ``[batch, x1, y1, x2, y2]``. What it holds never becomes an address: a batch index outside the
data, a coordinate that is no number and a region of more than :data:`LARGEST` elements along an axis mean
that there is nothing to read. What depends on the region alone is computed once, into tables.

Neither operator has a gradient with respect to the regions, as in torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ._loops import loops, tasks
from ._util import Shape, axes

#: A region that is larger along an axis, in elements of the data, is not looked at.
LARGEST = 2.0**20


def bounds(rois: te.Tensor, axis: int, attrs: dict, dtype: str) -> tuple[Callable, Callable]:
    """Return functions from a region to where it begins and ends along an axis (0: height, 1: width)."""
    scale = tirx.const(attrs["spatial_scale"], dtype)
    return tuple(
        lambda r, column=column: rois(r, column).astype(dtype) * scale
        for column in (2 - axis, 4 - axis)
    )


def batch_of(rois: te.Tensor, extent: tirx.PrimExpr, dtype: str) -> te.Tensor:
    """Return the table of the element of the batch that a region lies in, or -1."""

    def of(r):
        index = te.trunc(rois(r, 0).astype(dtype))
        limit = (tirx.const(1, "int64") * extent).astype(dtype)
        inside = tirx.all(index >= tirx.const(0, dtype), index < limit)
        found = tirx.Select(inside, index, tirx.const(0, dtype)).astype("int64")
        return tirx.Select(inside, found, tirx.const(-1, "int64"))

    return table(rois, of)


def table(rois: te.Tensor, of: Callable) -> te.Tensor:
    return te.compute((rois.shape[0],), lambda r: of(r), name="region")


def scatter(
    add_bin, inputs, regions, data_shape: Shape, attrs: dict, dtype: str, scratch: bool = False
) -> te.Tensor:
    """Let ``add_bin`` add what each bin of each region contributes to the gradient of the data.

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
        with tasks([n_extent, c_extent]) as (n, c):
            with loops(spatial) as place:
                T.buffer_store(out, tirx.const(0, dtype), list(place_of(at, n, c, *place)))
            with (
                T.serial(count) as r,
                T.If(tables.batch[r] == n),
                T.Then(),
                loops(attrs["pooled_size"]) as bin_,
            ):
                add_bin(out, *ins, tables, r, n, c, bin_, *rest)

    outputs = [(data_shape, dtype)]
    if scratch:
        outputs += [([n_extent * c_extent, 4], own) for own in ("int64", dtype)]
    return statements(body, [*inputs, *regions], outputs, "roi_backward")[0]


def statements(body, inputs, outputs, name: str) -> list[te.Tensor]:
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


def row_and_column(number, columns) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    width = tirx.max(columns, 1)
    return tirx.floordiv(number, width), tirx.floormod(number, width)


def bins_shape(data_shape: Shape, regions, attrs: dict) -> list:
    channels = data_shape[attrs["layout"].index("C")]
    return [regions.batch.shape[0], channels, *attrs["pooled_size"]]


def pooled_shape(data_shape: Shape, rois: te.Tensor, attrs: dict) -> tuple:
    at = axes(attrs["layout"], "NCHW")
    return place_of(at, rois.shape[0], data_shape[at[1]], *attrs["pooled_size"])


def spatial(data_shape: Shape, at: Sequence[int]) -> list[tirx.PrimExpr]:
    return [tirx.const(1, "int64") * data_shape[axis] for axis in at[2:]]


def place_of(at: Sequence[int], *values) -> tuple:
    """Order values for N, C, H and W by the layout."""
    return tuple(value for _, value in sorted(zip(at, values, strict=True), key=lambda p: p[0]))
