"""Convolutions by Winograd's minimal filtering, and their data gradients.

A square of m x m results of a kernel of r x r taps is computed from (m + r - 1) x (m + r - 1)
elements of the data with as many products, instead of r * r products for each result. Data and
weight are transformed, multiplied element-wise and summed over channels (a matrix product for each
element of the square), and transformed back. The transforms are from Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks" (2016). With m = 2 and r = 3 they only add and halve.
The error is then no larger than the error of a direct sum, and with m = 4 it is 4 to 7 times it:
docs/cpu.md has the measurements.

For volumes, the taps along the depth are terms of the sum over channels, and each slice of the data
is transformed once for all of them. With a dilation, a square has results that are as far apart as
the taps.

The lanes of a vector are channels in all transforms. If the transformed weight fits in the
second-level cache, a task performs all three steps for some rows of squares, and the intermediate
results stay in the cache. Otherwise, each step is performed for many images, so that each part of
the weight is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.statements import Emit
from ..language.stealing import shared
from ..matmul.tile import multiply_add
from ._channels_last import taps_of_channels, unpack_row
from ._chunks import whole_or_rest
from ._winograd_plan import WinogradPlan, winograd_data_plan, winograd_plan
from ._winograd_slices import Part
from ._winograd_tiles import Source, Transforms
from .geometry import Conv2d, Conv3d


def winograd(
    conv: Conv2d | Conv3d,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None = None,
    square: int = 2,
) -> tirx.PrimFunc:
    """Return the kernel of a convolution: a function of data, weight and result (float32).

    Parameters
    ----------
    conv : Conv2d or Conv3d
        The convolution; see :func:`is_winograd`.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters, if they differ from ``conv``'s.
    square : int
        The extent m of the squares of results: 2, or 4, which is faster and less accurate.
    """
    shapes = shapes or (conv.data_shape, conv.weight_shape, conv.out_shape)
    params = b.floats(("data", "weight", "result"), shapes)
    return b.prim_func("winograd", params, _Generator(winograd_plan(conv, cpu, square)).emit)


def winograd_backward_data(
    conv: Conv2d | Conv3d,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None = None,
    square: int = 2,
) -> tirx.PrimFunc:
    """Return the kernel of the data gradient: a function of output gradient, weight and data
    gradient (float32).

    It is the convolution of the output gradient with the flipped weight, whose input and output
    channels are swapped.

    Parameters
    ----------
    conv, cpu, shapes, square
        As for :func:`winograd`.
    """
    shapes = shapes or (conv.out_shape, conv.weight_shape, conv.data_shape)
    params = b.floats(("output_grad", "weight", "data_grad"), shapes)
    generator = _Generator(winograd_data_plan(conv, cpu, square))
    return b.prim_func("winograd_backward_data", params, generator.emit)


class _Generator:
    def __init__(self, plan: WinogradPlan):
        self.plan, self.squares = plan, plan.squares
        self.conv, self.slices = plan.conv, plan.slices
        self.vectors = Vectors(plan.lanes)
        self.transforms = Transforms(self.vectors)
        self.height, self.width = self.squares.height, self.squares.width
        self.tall, self.wide, self.cells = self.squares.tall, self.squares.wide, self.squares.cells

    def emit(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        turned = b.scratch(self.cells * self.plan.weight_plane)
        self._weight(weight, turned)
        (self._fused if self.plan.is_fused else self._stepwise)(source, turned, target)

    def _buffers(self) -> tuple[tirx.Buffer, tirx.Buffer]:
        """Allocate ``[cell][slice][square][channel]`` for data and results."""
        return tuple(
            b.scratch(self.cells * plane) for plane in (self.plan.in_plane, self.plan.out_plane)
        )

    def _fused(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        parts = ceil_div(self.tall, self.plan.rows)
        with shared(self.plan.batch * (self.plan.blocks * parts), self.plan.cores) as task:
            image, row = (
                bind(task // (self.plan.blocks * parts)),
                bind(task % parts * self.plan.rows),
            )
            block = self.slices.block(bind(task // parts % self.plan.blocks), self.plan.block)
            part = Part(image, const(1), *block)
            rows = bind(tirx.min(const(self.plan.rows), self.tall - row))
            data, results = self._buffers()
            with b.serial(0, part.read) as i:
                self._data(source, data, part, (const(0), i), (row, rows))
            tiles = self._tiles(data, part.read, bind(rows * self.wide))
            with b.serial(0, self.cells) as cell, b.serial(0, self.plan.panels) as panel:
                self._multiply(
                    data, weight, results, part=part, cell=cell, panel=panel, tiles=tiles
                )
            with b.serial(0, part.slices) as i:
                self._results(results, target, part, (const(0), i), (row, rows))

    def _stepwise(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        parts = ceil_div(self.tall, ceil_div(self.tall, 2))
        size = ceil_div(self.tall, parts)
        data, results = self._buffers()

        def each_part(images: Extent, slices: Extent, emit: Emit) -> None:
            with shared(images * slices * parts, self.plan.cores) as task:
                i, row = bind(task // parts), bind(task % parts * size)
                rows = bind(tirx.min(const(size), self.tall - row))
                emit((bind(i // slices), bind(i % slices)), (row, rows))

        # The last chunk may have fewer images, after which come squares of the previous chunk.
        images = bind(tirx.min(const(self.plan.images), as_expr(self.plan.batch)))
        self._tiles(data, self.slices.read(self.plan.block), bind(images * (self.tall * self.wide)))
        chunks = ceil_div(self.plan.batch, self.plan.images)
        with b.serial(0, chunks * self.plan.blocks) as chunk:
            first = bind(chunk // self.plan.blocks * self.plan.images)
            images = bind(tirx.min(const(self.plan.images), self.plan.batch - first))
            block = self.slices.block(bind(chunk % self.plan.blocks), self.plan.block)
            part = Part(first, images, *block)
            each_part(images, part.read, lambda at, rows: self._data(source, data, part, at, rows))
            tiles = bind(ceil_div(images * (self.tall * self.wide), self.plan.tile_rows))
            with shared(self.cells * self.plan.panels, self.plan.cores) as task:
                cell, panel = bind(task // self.plan.panels), bind(task % self.plan.panels)
                self._multiply(
                    data, weight, results, part=part, cell=cell, panel=panel, tiles=tiles
                )
            each_part(
                images, part.slices, lambda at, rows: self._results(results, target, part, at, rows)
            )

    def _tiles(self, data: Tensor, slices: Extent, squares: Extent) -> tirx.PrimExpr:
        """Return the number of tiles of some squares; clear the other squares of the last tile, in
        each element and slice."""
        tiles = bind(ceil_div(squares, self.plan.tile_rows))
        missing = bind((tiles * self.plan.tile_rows - squares) * self.plan.ins)
        with b.serial(0, self.cells) as cell, b.serial(0, slices) as i:
            start = cell * self.plan.in_plane + i * self.plan.in_slice + squares * self.plan.ins
            b.clear(data, start, missing)
        return tiles

    # Transforms

    def _weight(self, weight: Tensor, turned: tirx.Buffer) -> None:
        """Transform the weight to ``[cell][panel][tap][source channel][channel of the panel]``,
        where the taps are those along the depth."""
        conv, lanes, taps = self.conv, self.plan.lanes, self.slices.taps
        size, width = prod(conv.kernel), conv.kernel[1]
        blocks = ceil_div(conv.out_channels, lanes)
        with b.parallel(0, self.plan.outs // lanes) as block:
            channel = bind(block * lanes)
            panel, place = bind(channel // self.plan.panel), bind(channel % self.plan.panel)
            with b.serial(0, conv.in_channels) as c, b.serial(0, taps) as tap:
                if self.slices.is_flipped:
                    start, step = (c * conv.out_channels + channel) * taps + tap, taps
                    tap = taps - 1 - tap
                else:
                    start, step = (
                        (channel * conv.in_channels + c) * taps + tap,
                        conv.in_channels * taps,
                    )
                start, step = bind(start * size), step * size
                at = bind(
                    (panel * taps + tap) * self.plan.weight_slice + c * self.plan.panel + place
                )

                def vectors(
                    channels: int, start: Extent = start, step: int = step, at: Extent = at
                ) -> None:
                    values = taps_of_channels(self.vectors, (weight, start, step), size, channels)
                    values = values[::-1] if self.slices.is_flipped else values
                    rows = [values[i : i + width] for i in range(0, size, width)]
                    plane = self.plan.weight_plane
                    self.transforms.both(
                        self.squares.of_weight,
                        rows,
                        lambda cell, value: self.vectors.store(turned, at + cell * plane, value),
                    )

                def existing() -> None:
                    whole_or_rest(block, conv.out_channels, lanes, vectors)

                def missing(at: tuple = at) -> None:
                    with b.serial(0, self.cells) as cell:
                        b.clear(turned, at + cell * self.plan.weight_plane, lanes)

                if blocks * lanes == self.plan.outs:
                    existing()
                else:
                    b.either(block < blocks, existing, missing)

    def _square(self, at: tuple, row: int) -> tirx.PrimExpr:
        """Return the index of the first square of a row, in the slice of its image."""
        image, _ = at
        return image * (self.tall * self.wide) + row * self.wide

    def _data(self, source: Tensor, data: Tensor, part: Part, at: tuple, rows: tuple) -> None:
        """Transform rows of squares of a slice; ``at`` has its image and its index in the part."""
        image, phase = self.squares.image(part.first + at[0])
        axis = self.slices.axis
        plane = image * (self.conv.in_channels * axis.stored) + (part.start + at[1]) * axis.apart
        row, number = rows
        first = self._square(at, 0 if self.plan.is_fused else row)
        self.transforms.transform(
            Source(
                source,
                bind(plane),
                axis.stored,
                channels=self.conv.in_channels,
                height=self.height,
                width=self.width,
                phase=phase,
            ),
            self.squares.of_data,
            (row, number, self.plan.rows),
            (
                data,
                bind(at[1] * self.plan.in_slice + first * self.plan.ins),
                self.plan.ins,
                self.plan.in_plane,
            ),
        )

    def _results(
        self, results: tirx.Buffer, target: Tensor, part: Part, at: tuple, rows: tuple
    ) -> None:
        """Transform rows of squares of a slice back, and write them to the image."""
        conv, lanes = self.conv, self.plan.lanes
        square, across = self.height.size, self.width.size
        height, width = conv.out_size
        depth = self.slices.axis.target
        image, phase = self.squares.image(part.first + at[0])
        row, number = rows
        begin = bind(
            at[1] * self.plan.out_slice
            + self._square(at, 0 if self.plan.is_fused else row) * self.plan.outs
        )
        line = ceil_div(self.width.columns.number, lanes) * lanes * lanes
        lines = b.scratch(square * line)
        with b.serial(0, ceil_div(conv.out_channels, lanes)) as block, b.serial(0, number) as i:
            channel = bind(block * lanes)
            with b.serial(0, self.wide) as j:
                column = self.width.column(j)
                first = bind(begin + (i * self.wide + j) * self.plan.outs + channel)
                self.transforms.both(
                    self.squares.of_result,
                    self.transforms.cells(
                        self.squares.of_result, results, first, self.plan.out_plane
                    ),
                    lambda cell, value, column=column: self.vectors.store(
                        lines,
                        cell // across * line + (column + cell % across * self.width.apart) * lanes,
                        value,
                    ),
                )
            top = bind((row + i) * (square * self.height.apart) + phase)
            plane = (image * conv.out_channels + channel) * depth + part.slice + at[1]
            start = bind(plane * height + top)

            def write(channels: int, top: Extent = top, start: Extent = start) -> None:
                with b.serial(0, square) as r:
                    down = r * self.height.apart
                    place = target, (start + down) * width, depth * height * width
                    with b.when(top + down < height):
                        unpack_row(self.vectors, (lines, r * line), place, width, channels)

            whole_or_rest(block, conv.out_channels, lanes, write)

    # Products

    def _multiply(
        self,
        data: Tensor,
        weight: Tensor,
        results: tirx.Buffer,
        part: Part,
        cell: Extent,
        panel: Extent,
        tiles: Extent,
    ) -> None:
        """Emit the matrix product of one element of the squares and one panel of channels."""
        depth, slices = self.conv.in_channels, self.slices
        base = bind(cell * self.plan.weight_plane + panel * (slices.taps * self.plan.weight_slice))
        column = bind(panel * self.plan.panel)
        for first in range(0, depth, self.plan.depth):
            number = min(self.plan.depth, depth - first)
            with b.serial(0, part.slices) as z, b.serial(0, tiles) as i:
                square = bind(i * self.plan.tile_rows)
                self._tile(
                    (data, bind(cell * self.plan.in_plane + square * self.plan.ins + first)),
                    (weight, bind(base + first * self.plan.panel)),
                    (
                        results,
                        bind(
                            cell * self.plan.out_plane
                            + z * self.plan.out_slice
                            + (square * self.plan.outs + column)
                        ),
                    ),
                    depth=number,
                    index=bind(part.slice + z),
                    start=part.start,
                    add=first > 0,
                )

    def _tile(
        self,
        data: tuple[tirx.Buffer, tirx.PrimExpr],
        weight: tuple[tirx.Buffer, tirx.PrimExpr],
        results: tuple[tirx.Buffer, tirx.PrimExpr],
        depth: int,
        index: Extent,
        start: Extent,
        *,
        add: bool,
    ) -> None:
        """Emit a tile of the results of an element of the squares, in slice ``index`` of the
        target; each tensor is a buffer and an offset."""
        (values, at), (factors, begin), (sums, place) = data, weight, results
        lanes = self.plan.lanes

        def each(step: Callable) -> None:
            """Emit the sum over the taps along the depth, and over channels."""

            def of_tap(slice_: Extent, tap: Extent) -> None:
                read = bind(at + slice_ * self.plan.in_slice)
                of_weight = bind(begin + tap * self.plan.weight_slice)
                round_ = gcd(depth, self.plan.round)
                with b.serial(0, depth // round_) as i:
                    for k in range(round_):
                        place = i * round_ + k
                        step((read + place, of_weight + place * self.plan.panel))

            if self.slices.is_flat:
                of_tap(const(0), const(0))
            else:
                self.slices.each_tap(index, start, of_tap)

        multiply_add(
            self.vectors,
            (self.plan.tile_rows, self.plan.tile_vectors),
            None,
            value=lambda i, k: values[k[0] + i * self.plan.ins],
            vector=lambda k, v: self.vectors.load(factors, k[1] + v * lanes),
            place=lambda i, v: (sums, place + (i * self.plan.outs + v * lanes), None),
            add=add,
            each=each,
        )
