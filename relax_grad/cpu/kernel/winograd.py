"""Convolutions with 3x3 kernels by Winograd's minimal filtering, and their data gradients.

A square of m x m results is computed from (m + 2) x (m + 2) elements of the data with (m + 2)**2
products, instead of 9 products for each result. Data and weight are transformed, multiplied
element-wise and summed over channels (a matrix product for each element of the square), and
transformed back. The transforms are those of Lavin and Gray, "Fast Algorithms for Convolutional
Neural Networks" (2016). With m = 2 they only add and halve. The error is then no larger than that
of a direct sum, and with m = 4 it is 4 to 7 times that: docs/cpu.md has the measurements.

The lanes of a vector are channels in all transforms. If the transformed weight fits in the
second-level cache, a task performs all three steps for some rows of squares, and the intermediate
results stay in the cache. Otherwise, each step is performed for many images, so that each part of
the weight is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from ..target import CPU
from . import builder as b
from ._chunks import whole_or_rest
from ._pack import Block, pack_channels, taps_of_channels, unpack_row
from ._tile import multiply_add, tile_size
from .builder import Extent, Vectors, bind, ceil_div, const
from .convolution import Conv2d, Windows

#: The maximum bytes of the transformed weight for which a task performs all steps.
_FUSED_BYTES = 768 * 1024

#: Bytes of the transformed data and results: for one task, and for a chunk of images.
_TASK_BYTES, _CHUNK_BYTES = 512 * 1024, 8 * 1024 * 1024

#: Channels that a tile sums over at once.
_DEPTH = 256


@dataclass(frozen=True)
class Transform:
    """The matrices of F(m x m, 3 x 3), by rows: for the data, for the weight, and for the
    result."""

    data: tuple[tuple[float, ...], ...]
    weight: tuple[tuple[float, ...], ...]
    result: tuple[tuple[float, ...], ...]


TRANSFORMS = {
    2: Transform(
        data=((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
        weight=((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
        result=((1, 1, 1, 0), (0, 1, -1, -1)),
    ),
    4: Transform(
        data=(
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
        weight=(
            (1 / 4, 0, 0),
            (-1 / 6, -1 / 6, -1 / 6),
            (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, -1 / 12, 1 / 6),
            (0, 0, 1),
        ),
        result=(
            (1, 1, 1, 1, 1, 0),
            (0, 1, -1, 2, -2, 0),
            (0, 1, 1, 4, 4, 0),
            (0, 1, -1, 8, -8, 1),
        ),
    ),
}


def is_winograd(conv: Conv2d) -> bool:
    """Tell whether Winograd's algorithm applies: 3x3, without stride and dilation, padding up to 2,
    one group."""
    unit = (1, 1)
    return (
        conv.kernel == (3, 3)
        and (conv.strides, conv.dilation, conv.groups) == (unit, unit, 1)
        and min(conv.padding) >= 0
        and max(conv.padding) <= 2
    )


def winograd(
    conv: Conv2d,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None = None,
    square: int = 2,
) -> tirx.PrimFunc:
    """Return the kernel of a convolution: a function of data, weight and result (float32).

    Parameters
    ----------
    conv : Conv2d
        The convolution; see :func:`is_winograd`.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters, if they differ from those of ``conv``.
    square : int
        The extent m of the squares of results: 2, or 4, which is faster and less accurate.
    """
    shapes = shapes or (conv.data_shape, conv.weight_shape, conv.out_shape)
    params = b.floats(("data", "weight", "result"), shapes)
    return b.prim_func("winograd", params, _Generator(conv, cpu, square, backward=False).emit)


def winograd_backward_data(
    conv: Conv2d,
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
    top, left, bottom, right = (2 - before for before in conv.padding)
    turned = replace(
        conv,
        in_channels=conv.out_channels,
        out_channels=conv.in_channels,
        size=conv.out_size,
        padding=(top, left, bottom, right),
    )
    name = "winograd_backward_data"
    return b.prim_func(name, params, _Generator(turned, cpu, square, backward=True).emit)


class Squares:
    """Transforms of squares of pixels; the lanes are channels.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    square : int
        The distance between neighbouring squares, in pixels.
    """

    @dataclass(frozen=True)
    class Source:
        """An image with its channels and axes; the number of windows of an axis is a multiple of
        ``square``."""

        buffer: tirx.Buffer
        image: tirx.PrimExpr
        channels: int
        height: Windows
        width: Windows

    def __init__(self, vectors: Vectors, square: int):
        self.vectors, self.square = vectors, square

    def transform(
        self,
        source: Source,
        matrix: Sequence[Sequence[float]],
        rows: tuple[tirx.PrimExpr, Extent, int],
        target: tuple[tirx.Buffer, tirx.PrimExpr, Extent, Extent],
    ) -> None:
        """Multiply the squares of some rows of an image by a matrix from the left and its transpose
        from the right.

        Parameters
        ----------
        source : Squares.Source
            The image.
        matrix : Sequence[Sequence[float]]
            The matrix, with a column for each pixel along the side of a square.
        rows : tuple
            The first row of squares, the number of rows, and its maximum.
        target : tuple
            A buffer ``[cell][square][channel]``, the index of the first square, the stride of the
            squares, and the stride of the cells.
        """
        row, number, most = rows
        buffer, first, pixel, plane = target
        lanes, square, side = self.vectors.lanes, self.square, len(matrix[0])
        columns = source.width.span(source.width.number)
        wide = source.width.number // square
        halo = side - square
        packed = b.scratch((most * square + halo) * columns * lanes)
        with b.serial(0, ceil_div(source.channels, lanes)) as block:
            channel = bind(block * lanes)
            pack_channels(
                self.vectors,
                source.width,
                source.height,
                Block(source.buffer, source.image * source.channels, channel, source.channels),
                (bind(row * square), bind(number * square + halo)),
                (packed, const(0), lanes),
            )
            with b.serial(0, number) as i, b.serial(0, wide) as j:
                corner = bind((i * columns + j) * (square * lanes))
                at = bind((first + i * wide + j) * pixel + channel)
                pixels = [
                    [
                        bind(self.vectors.load(packed, corner + (y * columns + x) * lanes))
                        for x in range(side)
                    ]
                    for y in range(side)
                ]
                self.both(
                    matrix,
                    pixels,
                    lambda cell, value, at=at: self.vectors.store(buffer, at + cell * plane, value),
                )

    def both(
        self,
        matrix: Sequence[Sequence[float]],
        elements: Sequence[Sequence[tirx.PrimExpr]],
        store: Callable,
    ) -> None:
        """Multiply a square of vectors by a matrix from the left and by its transpose from the
        right."""
        columns = [
            [self._combined(row, column) for row in matrix]
            for column in zip(*elements, strict=True)
        ]
        for y in range(len(matrix)):
            across = [column[y] for column in columns]
            for x, row in enumerate(matrix):
                store(y * len(matrix) + x, self._combined(row, across))

    def _combined(self, row, vectors):
        """Return the linear combination of vectors with the factors of a row."""
        total = None
        for factor, vector in zip(row, vectors, strict=True):
            if factor == 0:
                continue
            term = vector if abs(factor) == 1 else vector * self.vectors.splat(abs(factor))
            if total is None:
                total = term if factor > 0 else self.vectors.splat(0) - term
            else:
                total = total + term if factor > 0 else total - term
        return bind(total)


class _Generator:
    def __init__(self, conv: Conv2d, cpu: CPU, square: int, *, backward: bool):
        self.conv, self.cpu, self.backward = conv, cpu, backward
        self.vectors = Vectors(cpu.lanes)
        self.transform, self.square = TRANSFORMS[square], square
        self.squares_of = Squares(self.vectors, square)
        self.side = square + 2
        self.cells = self.side**2
        self.height, self.width = (
            whole_squares(axis, square) for axis in (conv.height, conv.width)
        )
        self.tall, self.wide = self.height.number // square, self.width.number // square
        self.ins = ceil_div(conv.in_channels, cpu.lanes) * cpu.lanes
        height, self.tile_vectors = tile_size(cpu)
        self.tile_vectors = min(self.tile_vectors, ceil_div(conv.out_channels, cpu.lanes))
        self.panel = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(conv.out_channels, self.panel)
        self.outs = self.panels * self.panel
        weight = 4 * self.cells * conv.in_channels * self.outs
        self.is_fused = weight <= _FUSED_BYTES
        row = 4 * self.cells * (self.ins + self.outs) * self.wide
        if self.is_fused:
            self.images, self.rows = 1, self._rows(row)
        else:
            self.images, self.rows = self._images(row), self.tall
        self.tile_rows = balanced(self.images * self.rows * self.wide, height)
        number = ceil_div(self.images * self.rows * self.wide, self.tile_rows)
        squares = number * self.tile_rows
        # The strides of the elements of a square: in data, results and weight.
        self.in_plane, self.out_plane, self.weight_plane = (
            apart(size)
            for size in (
                squares * self.ins,
                squares * self.outs,
                self.panels * conv.in_channels * self.panel,
            )
        )

    def _rows(self, row: int) -> int:
        """Return the number of rows of squares of a task."""
        rows = max(1, min(self.tall, _TASK_BYTES // row))
        if isinstance(self.conv.batch, int):
            parts = ceil_div(2 * self.cpu.cores, self.conv.batch)
            rows = min(rows, ceil_div(self.tall, parts))
        return ceil_div(self.tall, ceil_div(self.tall, rows))

    def _images(self, row: int) -> int:
        """Return the number of images of a chunk."""
        images = max(1, _CHUNK_BYTES // (row * self.tall))
        if isinstance(self.conv.batch, int):
            return ceil_div(self.conv.batch, ceil_div(self.conv.batch, images))
        return min(images, 8)

    def emit(self, source, weight, target) -> None:
        turned = b.scratch(self.cells * self.weight_plane)
        self._weight(weight, turned)
        (self._fused if self.is_fused else self._stepwise)(source, turned, target)

    def _buffers(self):
        """Allocate ``[cell][square][channel]`` for data and results."""
        return tuple(b.scratch(self.cells * plane) for plane in (self.in_plane, self.out_plane))

    def _fused(self, source, weight, target) -> None:
        blocks = ceil_div(self.tall, self.rows)
        with b.parallel(0, self.conv.batch * blocks) as task:
            image, row = bind(task // blocks), bind(task % blocks * self.rows)
            rows = bind(tirx.min(const(self.rows), self.tall - row))
            data, results = self._buffers()
            self._data(source, data, image, row, rows, const(0))
            tiles = bind(ceil_div(rows * self.wide, self.tile_rows))
            with b.serial(0, self.cells) as cell, b.serial(0, self.panels) as panel:
                self._multiply(data, weight, results, cell, panel, tiles)
            self._results(results, target, image, row, rows, const(0))

    def _stepwise(self, source, weight, target) -> None:
        parts = ceil_div(self.tall, ceil_div(self.tall, 2))
        size = ceil_div(self.tall, parts)
        data, results = self._buffers()

        def each_part(images, emit: Callable) -> None:
            with b.parallel(0, images * parts) as task:
                i, row = bind(task // parts), bind(task % parts * size)
                rows = bind(tirx.min(const(size), self.tall - row))
                emit(i, row, rows, bind((i * self.tall + row) * self.wide))

        with b.serial(0, ceil_div(self.conv.batch, self.images)) as chunk:
            first = bind(chunk * self.images)
            images = bind(tirx.min(const(self.images), self.conv.batch - first))
            each_part(
                images,
                lambda i, row, rows, at: self._data(source, data, first + i, row, rows, at),
            )
            tiles = bind(ceil_div(images * (self.tall * self.wide), self.tile_rows))
            with b.parallel(0, self.cells * self.panels) as task:
                cell, panel = bind(task // self.panels), bind(task % self.panels)
                self._multiply(data, weight, results, cell, panel, tiles)
            each_part(
                images,
                lambda i, row, rows, at: self._results(results, target, first + i, row, rows, at),
            )

    # Transforms

    def _weight(self, weight, turned) -> None:
        """Transform the weight to ``[cell][panel][source channel][channel of the panel]``."""
        conv, lanes = self.conv, self.cpu.lanes
        with b.parallel(0, ceil_div(conv.out_channels, lanes)) as block:
            channel = bind(block * lanes)
            panel, place = bind(channel // self.panel), bind(channel % self.panel)
            with b.serial(0, conv.in_channels) as c:
                if self.backward:
                    start, step = bind((c * conv.out_channels + channel) * 9), 9
                else:
                    start, step = bind((channel * conv.in_channels + c) * 9), conv.in_channels * 9
                at = bind((panel * conv.in_channels + c) * self.panel + place)

                def vectors(channels: int, start=start, step=step, at=at) -> None:
                    taps = taps_of_channels(self.vectors, (weight, start, step), 9, channels)
                    taps = taps[::-1] if self.backward else taps
                    rows = [taps[i : i + 3] for i in range(0, 9, 3)]
                    plane = self.weight_plane
                    self.squares_of.both(
                        self.transform.weight,
                        rows,
                        lambda cell, value: self.vectors.store(turned, at + cell * plane, value),
                    )

                whole_or_rest(block, conv.out_channels, lanes, vectors)

    def _data(self, source, data, image, row, rows, first) -> None:
        """Transform rows of squares of an image; ``first`` is the index of the first square."""
        self.squares_of.transform(
            Squares.Source(source, image, self.conv.in_channels, self.height, self.width),
            self.transform.data,
            (row, rows, self.rows),
            (data, first, self.ins, self.in_plane),
        )

    def _results(self, results, target, image, row, rows, first) -> None:
        """Transform rows of squares back, and write them to the image."""
        conv, lanes, side, square = self.conv, self.cpu.lanes, self.side, self.square
        height, width = conv.out_size
        line = ceil_div(self.wide * square, lanes) * lanes * lanes
        lines = [b.scratch(line) for _ in range(square)]
        with b.serial(0, ceil_div(conv.out_channels, lanes)) as block, b.serial(0, rows) as i:
            channel = bind(block * lanes)
            with b.serial(0, self.wide) as j:
                at = bind((first + i * self.wide + j) * self.outs + channel)
                cells = [
                    [
                        bind(self.vectors.load(results, at + (y * side + x) * self.out_plane))
                        for x in range(side)
                    ]
                    for y in range(side)
                ]
                self.squares_of.both(
                    self.transform.result,
                    cells,
                    lambda cell, value, j=j: self.vectors.store(
                        lines[cell // square], (j * square + cell % square) * lanes, value
                    ),
                )
            top = bind((row + i) * square)
            start = bind((image * conv.out_channels + channel) * height + top)

            def write(channels: int, top=top, start=start) -> None:
                for r in range(square):
                    place = target, (start + r) * width, height * width
                    with b.when(top + r < height):
                        unpack_row(self.vectors, lines[r], place, width, channels)

            whole_or_rest(block, conv.out_channels, lanes, write)

    # Products

    def _multiply(self, data, weight, results, cell, panel, tiles) -> None:
        """Emit the matrix product of one element of the squares and one panel of channels."""
        depth, panel_size = self.conv.in_channels, self.panel
        base = bind(cell * self.weight_plane + panel * (depth * panel_size))
        column = bind(panel * panel_size)
        stretches = ceil_div(depth, _DEPTH)
        size = ceil_div(depth, stretches)
        for first in range(0, depth, size):
            number = min(size, depth - first)
            with b.serial(0, tiles) as i:
                square = bind(i * self.tile_rows)
                self._tile(
                    (data, bind(cell * self.in_plane + square * self.ins + first)),
                    (weight, bind(base + first * panel_size)),
                    (results, bind(cell * self.out_plane + square * self.outs + column)),
                    number,
                    add=first > 0,
                )

    def _tile(self, data, weight, results, depth: int, *, add: bool) -> None:
        """Emit a tile of the results of an element of the squares; each tensor is a buffer and an
        offset."""
        (values, at), (factors, start), (sums, place) = data, weight, results
        lanes = self.cpu.lanes
        multiply_add(
            self.vectors,
            (self.tile_rows, self.tile_vectors),
            depth,
            lambda i, k: values[at + (k + i * self.ins)],
            lambda k, v: self.vectors.load(factors, start + (k * self.panel + v * lanes)),
            lambda i, v: (sums, place + (i * self.outs + v * lanes), None),
            add=add,
        )


def whole_squares(axis: Windows, square: int) -> Windows:
    """Return an axis padded at its end such that its number of windows is a multiple of
    ``square``."""
    return replace(axis, after=axis.after + -axis.number % square)


def apart(size: int) -> int:
    """Return a stride for planes of ``size`` elements that is an odd number of cache lines.

    With other strides, simultaneous stores to many planes would often map to the same set of the
    cache.
    """
    return (ceil_div(size, 16) | 1) * 16


def balanced(count: int, most: int) -> int:
    """Return a tile height up to ``most`` that wastes few rows."""
    sizes = range(most, max(1, most // 2) - 1, -1)
    return min(sizes, key=lambda size: ceil_div(count, size) * (size + 1))
