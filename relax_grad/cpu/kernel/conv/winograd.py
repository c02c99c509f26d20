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
from dataclasses import replace
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
from ._winograd_slices import Part, Slices
from ._winograd_tiles import Source, Tiles, Transforms, apart, balanced
from ._winograd_transforms import Transform, transform_of
from .gathering import Axis
from .geometry import ONE, Conv2d, Conv3d, Windows

#: Channels that a tile sums over at once.
_DEPTH = 256

#: The extents m of squares with a choice of accuracy.
SQUARES = (2, 4)


def is_winograd(conv: Conv2d | Conv3d) -> bool:
    """Tell whether Winograd's algorithm applies: kernels of 1, 3 or 5 rows and columns, without
    stride, one group. Images have at most as much padding as taps reach, and volumes any depth."""
    images, _ = parts_of(conv)
    return (
        max(images.kernel) > 1
        and set(images.kernel) <= {1, 3, 5}
        and (images.strides, images.groups) == ((1, 1), 1)
        and all(
            0 <= size <= most for size, most in zip(images.padding, _reach(images), strict=True)
        )
    )


def _reach(images: Conv2d) -> tuple[int, ...]:
    """Return the distances of the first and last taps, in the order of the padding."""
    height, width = ((axis.kernel - 1) * axis.dilation for axis in (images.height, images.width))
    return height, width, height, width


def tiles_of(images: Conv2d, square: int) -> tuple[int, int]:
    """Return the number of rows of tiles of an image, and of tiles in a row."""
    down, across = transforms_of(images, square)
    height = Tiles.of(images.height, down.results)
    return height.tall * height.phases, Tiles.of(images.width, across.results).wide


def transforms_of(conv: Conv2d, square: int) -> tuple[Transform, Transform]:
    """Return the transforms for the rows and for the columns of a convolution of images."""
    results = {1: 1, 3: square}
    height, width = (transform_of(results.get(taps, 2), taps) for taps in conv.kernel)
    return height, width


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
    images, depth = parts_of(conv)
    generator = _Generator(images, Slices(Axis.forward(depth), depth.kernel), cpu, square)
    return b.prim_func("winograd", params, generator.emit)


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
    images, depth = parts_of(conv)
    top, left, bottom, right = (
        most - size for most, size in zip(_reach(images), images.padding, strict=True)
    )
    turned = replace(
        images,
        in_channels=images.out_channels,
        out_channels=images.in_channels,
        size=images.out_size,
        padding=(top, left, bottom, right),
    )
    slices = Slices(Axis.backward(depth), depth.kernel, is_flipped=True)
    generator = _Generator(turned, slices, cpu, square)
    return b.prim_func("winograd_backward_data", params, generator.emit)


def parts_of(conv: Conv2d | Conv3d) -> tuple[Conv2d, Windows]:
    """Return the convolution of images, and the axis along which their results are added."""
    return (conv.slices, conv.depth) if isinstance(conv, Conv3d) else (conv, ONE)


class _Generator:
    def __init__(self, conv: Conv2d, slices: Slices, cpu: CPU, square: int):
        self.conv, self.slices, self.cpu = conv, slices, cpu
        self.vectors = Vectors(cpu.lanes)
        self.transforms = Transforms(self.vectors)
        down, across = transforms_of(conv, square)
        self.data_matrices = down.data, across.data
        self.weight_matrices = down.weight, across.weight
        self.result_matrices = down.result, across.result
        self.cells = down.side * across.side
        self.height = Tiles.of(conv.height, down.results)
        self.width = Tiles.of(conv.width, across.results)
        self.tall, self.wide = self.height.tall, self.width.wide
        self.batch = conv.batch * self.height.phases
        self.ins = ceil_div(conv.in_channels, cpu.lanes) * cpu.lanes
        height, self.tile_vectors = cpu.tuning.tiles.largest
        self.tile_vectors = min(self.tile_vectors, ceil_div(conv.out_channels, cpu.lanes))
        self.panel = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(conv.out_channels, self.panel)
        self.outs = self.panels * self.panel
        weight = 4 * self.cells * slices.taps * conv.in_channels * self.outs
        self.is_fused = weight <= cpu.tuning.convolutions.winograd_fused
        if self.is_fused:
            self.images = 1
            self.block, self.rows = self._partition()
        else:
            self.block = self._block(cpu.tuning.convolutions.winograd_chunk)
            self.images, self.rows = self._images(self._row(self.block)), self.tall
        self.tile_rows = balanced(self.images * self.rows * self.wide, height)
        number = ceil_div(self.images * self.rows * self.wide, self.tile_rows)
        squares = number * self.tile_rows
        # The strides of slices and of the elements of a square, in data, results and weight.
        self.in_slice, self.out_slice = squares * self.ins, squares * self.outs
        self.weight_slice = conv.in_channels * self.panel
        self.in_plane, self.out_plane, self.weight_plane = (
            apart(size)
            for size in (
                slices.read(self.block) * self.in_slice,
                self.block * self.out_slice,
                self.panels * slices.taps * self.weight_slice,
            )
        )
        self.blocks = ceil_div(slices.axis.target, self.block)

    def _row(self, block: int) -> int:
        """Return the bytes of a row of squares of a block of slices."""
        channels = self.ins * self.slices.read(block) + self.outs * block
        return 4 * self.cells * channels * self.wide

    def _block(self, most: int) -> int:
        """Return the number of slices of a block whose squares take at most so many bytes."""
        sizes = self.slices.sizes()
        return next((size for size in sizes if self._row(size) * self.tall <= most), sizes[-1])

    def _partition(self) -> tuple[int, int]:
        """Return the number of slices and the number of rows of squares of a task."""
        if self.slices.is_flat:
            return 1, self._rows(1)

        def cost(partition: tuple[int, int]) -> float:
            """Return the copies and transforms of a slice of the source, for a slice of the
            target."""
            block, rows = partition
            halo = (self.height.windows.kernel - 1) / (rows * self.height.size)
            excess = max(1.0, self._row(block) * rows / self.cpu.tuning.convolutions.winograd_task)
            return self.slices.read(block) / block * (1 + 0.5 * halo) * excess

        return min(((size, self._rows(size)) for size in self.slices.sizes()), key=cost)

    def _rows(self, block: int) -> int:
        """Return the number of rows of squares of a task."""
        rows = max(
            1, min(self.tall, self.cpu.tuning.convolutions.winograd_task // self._row(block))
        )
        if isinstance(self.batch, int):
            blocks = self.batch * ceil_div(self.slices.axis.target, block)
            rows = min(rows, ceil_div(self.tall, ceil_div(2 * self.cpu.cores, blocks)))
        return ceil_div(self.tall, ceil_div(self.tall, rows))

    def _images(self, row: int) -> int:
        """Return the number of images of a chunk."""
        images = max(1, self.cpu.tuning.convolutions.winograd_chunk // (row * self.tall))
        if isinstance(self.batch, int):
            return ceil_div(self.batch, ceil_div(self.batch, images))
        return min(images, 8)

    def emit(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        turned = b.scratch(self.cells * self.weight_plane)
        self._weight(weight, turned)
        (self._fused if self.is_fused else self._stepwise)(source, turned, target)

    def _buffers(self) -> tuple[tirx.Buffer, tirx.Buffer]:
        """Allocate ``[cell][slice][square][channel]`` for data and results."""
        return tuple(b.scratch(self.cells * plane) for plane in (self.in_plane, self.out_plane))

    def _fused(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        parts = ceil_div(self.tall, self.rows)
        with shared(self.batch * (self.blocks * parts), self.cpu.cores) as task:
            image, row = bind(task // (self.blocks * parts)), bind(task % parts * self.rows)
            block = self.slices.block(bind(task // parts % self.blocks), self.block)
            part = Part(image, const(1), *block)
            rows = bind(tirx.min(const(self.rows), self.tall - row))
            data, results = self._buffers()
            with b.serial(0, part.read) as i:
                self._data(source, data, part, (const(0), i), (row, rows))
            tiles = self._tiles(data, part.read, bind(rows * self.wide))
            with b.serial(0, self.cells) as cell, b.serial(0, self.panels) as panel:
                self._multiply(data, weight, results, part, cell, panel, tiles)
            with b.serial(0, part.slices) as i:
                self._results(results, target, part, (const(0), i), (row, rows))

    def _stepwise(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        parts = ceil_div(self.tall, ceil_div(self.tall, 2))
        size = ceil_div(self.tall, parts)
        data, results = self._buffers()

        def each_part(images: Extent, slices: Extent, emit: Emit) -> None:
            with shared(images * slices * parts, self.cpu.cores) as task:
                i, row = bind(task // parts), bind(task % parts * size)
                rows = bind(tirx.min(const(size), self.tall - row))
                emit((bind(i // slices), bind(i % slices)), (row, rows))

        # The last chunk may have fewer images, after which come squares of the previous chunk.
        images = bind(tirx.min(const(self.images), as_expr(self.batch)))
        self._tiles(data, self.slices.read(self.block), bind(images * (self.tall * self.wide)))
        chunks = ceil_div(self.batch, self.images)
        with b.serial(0, chunks * self.blocks) as chunk:
            first = bind(chunk // self.blocks * self.images)
            images = bind(tirx.min(const(self.images), self.batch - first))
            block = self.slices.block(bind(chunk % self.blocks), self.block)
            part = Part(first, images, *block)
            each_part(images, part.read, lambda at, rows: self._data(source, data, part, at, rows))
            tiles = bind(ceil_div(images * (self.tall * self.wide), self.tile_rows))
            with shared(self.cells * self.panels, self.cpu.cores) as task:
                cell, panel = bind(task // self.panels), bind(task % self.panels)
                self._multiply(data, weight, results, part, cell, panel, tiles)
            each_part(
                images, part.slices, lambda at, rows: self._results(results, target, part, at, rows)
            )

    def _tiles(self, data: Tensor, slices: Extent, squares: Extent) -> tirx.PrimExpr:
        """Return the number of tiles of some squares; clear the other squares of the last tile, in
        each element and slice."""
        tiles = bind(ceil_div(squares, self.tile_rows))
        missing = bind((tiles * self.tile_rows - squares) * self.ins)
        with b.serial(0, self.cells) as cell, b.serial(0, slices) as i:
            start = cell * self.in_plane + i * self.in_slice + squares * self.ins
            b.clear(data, start, missing)
        return tiles

    # Transforms

    def _weight(self, weight: Tensor, turned: tirx.Buffer) -> None:
        """Transform the weight to ``[cell][panel][tap][source channel][channel of the panel]``,
        where the taps are those along the depth."""
        conv, lanes, taps = self.conv, self.cpu.lanes, self.slices.taps
        size, width = prod(conv.kernel), conv.kernel[1]
        blocks = ceil_div(conv.out_channels, lanes)
        with b.parallel(0, self.outs // lanes) as block:
            channel = bind(block * lanes)
            panel, place = bind(channel // self.panel), bind(channel % self.panel)
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
                at = bind((panel * taps + tap) * self.weight_slice + c * self.panel + place)

                def vectors(
                    channels: int, start: Extent = start, step: int = step, at: Extent = at
                ) -> None:
                    values = taps_of_channels(self.vectors, (weight, start, step), size, channels)
                    values = values[::-1] if self.slices.is_flipped else values
                    rows = [values[i : i + width] for i in range(0, size, width)]
                    plane = self.weight_plane
                    self.transforms.both(
                        self.weight_matrices,
                        rows,
                        lambda cell, value: self.vectors.store(turned, at + cell * plane, value),
                    )

                def existing() -> None:
                    whole_or_rest(block, conv.out_channels, lanes, vectors)

                def missing(at: tuple = at) -> None:
                    with b.serial(0, self.cells) as cell:
                        b.clear(turned, at + cell * self.weight_plane, lanes)

                if blocks * lanes == self.outs:
                    existing()
                else:
                    b.either(block < blocks, existing, missing)

    def _square(self, at: tuple, row: int) -> tirx.PrimExpr:
        """Return the index of the first square of a row, in the slice of its image."""
        image, _ = at
        return image * (self.tall * self.wide) + row * self.wide

    def _data(self, source: Tensor, data: Tensor, part: Part, at: tuple, rows: tuple) -> None:
        """Transform rows of squares of a slice; ``at`` has its image and its index in the part."""
        image, phase = self._image(part.first + at[0])
        axis = self.slices.axis
        plane = image * (self.conv.in_channels * axis.stored) + (part.start + at[1]) * axis.apart
        row, number = rows
        first = self._square(at, 0 if self.is_fused else row)
        self.transforms.transform(
            Source(
                source,
                bind(plane),
                axis.stored,
                self.conv.in_channels,
                self.height,
                self.width,
                phase,
            ),
            self.data_matrices,
            (row, number, self.rows),
            (data, bind(at[1] * self.in_slice + first * self.ins), self.ins, self.in_plane),
        )

    def _results(
        self, results: tirx.Buffer, target: Tensor, part: Part, at: tuple, rows: tuple
    ) -> None:
        """Transform rows of squares of a slice back, and write them to the image."""
        conv, lanes = self.conv, self.cpu.lanes
        square, across = self.height.size, self.width.size
        height, width = conv.out_size
        depth = self.slices.axis.target
        image, phase = self._image(part.first + at[0])
        row, number = rows
        begin = bind(
            at[1] * self.out_slice + self._square(at, 0 if self.is_fused else row) * self.outs
        )
        line = ceil_div(self.width.columns.number, lanes) * lanes * lanes
        lines = b.scratch(square * line)
        with b.serial(0, ceil_div(conv.out_channels, lanes)) as block, b.serial(0, number) as i:
            channel = bind(block * lanes)
            with b.serial(0, self.wide) as j:
                column = self.width.column(j)
                first = bind(begin + (i * self.wide + j) * self.outs + channel)
                self.transforms.both(
                    self.result_matrices,
                    self.transforms.cells(self.result_matrices, results, first, self.out_plane),
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

    def _image(self, index: Extent) -> tuple:
        """Return an image, and the index of one of its interleaved images."""
        phases = self.height.phases
        if phases == 1:
            return bind(index), const(0)
        return bind(index // phases), bind(index % phases)

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
        base = bind(cell * self.weight_plane + panel * (slices.taps * self.weight_slice))
        column = bind(panel * self.panel)
        stretches = ceil_div(depth, _DEPTH)
        size = ceil_div(depth, stretches)
        for first in range(0, depth, size):
            number = min(size, depth - first)
            with b.serial(0, part.slices) as z, b.serial(0, tiles) as i:
                square = bind(i * self.tile_rows)
                self._tile(
                    (data, bind(cell * self.in_plane + square * self.ins + first)),
                    (weight, bind(base + first * self.panel)),
                    (
                        results,
                        bind(
                            cell * self.out_plane
                            + z * self.out_slice
                            + (square * self.outs + column)
                        ),
                    ),
                    number,
                    bind(part.slice + z),
                    part.start,
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
        lanes = self.cpu.lanes

        def each(step: Callable) -> None:
            """Emit the sum over the taps along the depth, and over channels."""

            def of_tap(slice_: Extent, tap: Extent) -> None:
                read = bind(at + slice_ * self.in_slice)
                of_weight = bind(begin + tap * self.weight_slice)
                round_ = gcd(depth, self.cpu.tuning.convolutions.winograd_round)
                with b.serial(0, depth // round_) as i:
                    for k in range(round_):
                        place = i * round_ + k
                        step((read + place, of_weight + place * self.panel))

            if self.slices.is_flat:
                of_tap(const(0), const(0))
            else:
                self.slices.each_tap(index, start, of_tap)

        multiply_add(
            self.vectors,
            (self.tile_rows, self.tile_vectors),
            None,
            lambda i, k: values[k[0] + i * self.ins],
            lambda k, v: self.vectors.load(factors, k[1] + v * lanes),
            lambda i, v: (sums, place + (i * self.outs + v * lanes), None),
            add=add,
            each=each,
        )
