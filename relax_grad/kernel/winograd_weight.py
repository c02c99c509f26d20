"""The weight gradient of convolutions with 3x3 kernels by Winograd's minimal filtering.

As in :mod:`relax_grad.kernel.winograd`, with what the transposes of its transforms make of the output gradient and of the
products: for each element of a square the products are a matrix of output by input channels, summed over
all squares of all images, of which at last 9 are made. With squares of 2 x 2 the error is that of a direct sum.

The images are gone through in chunks, of which all squares stay in the last-level cache. The threads first
transform them, then each adds up some matrices; so the order of every sum is that of the squares, whatever the
number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Accumulators, Extent, Vectors, bind, ceil_div, const
from ._chunks import unless_empty, whole_or_rest
from ._convolution import Conv2d, Windows
from .matmul import tile as matmul_tile
from .winograd import TRANSFORMS, Squares, balanced, whole_squares

#: Bytes of the transformed squares of a chunk.
_CHUNK_BYTES = 4 * 1024 * 1024


def winograd_weight(
    conv: Conv2d,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None = None,
    square: int = 2,
) -> tirx.PrimFunc:
    """Return the function of dY, X and dW (float32) that sets dW to the gradient.

    Parameters
    ----------
    conv : Conv2d
        The convolution; see :func:`relax_grad.kernel.winograd.is_winograd`.
    cpu : CPU
        What the function is for.
    shapes : Sequence, optional
        The shapes of dY, X and dW as the function's parameters have them, where they are not those of the
        convolution.
    square : int
        The extent of the squares: 2, or 4, which is faster and less accurate.
    """
    shapes = shapes or [conv.out_shape, conv.data_shape, conv.weight_shape]
    params = [
        (name, shape, "float32") for name, shape in zip(("DY", "X", "DW"), shapes, strict=True)
    ]
    return b.prim_func("winograd_weight", params, _Generator(conv, cpu, square).emit)


class _Generator:
    def __init__(self, conv: Conv2d, cpu: CPU, square: int):
        self.conv, self.cpu, self.square = conv, cpu, square
        self.vectors = Vectors(cpu.lanes)
        self.squares = Squares(self.vectors, square)
        self.transform = TRANSFORMS[square]
        self.side = square + 2
        self.cells = self.side**2
        self.height, self.width = (
            whole_squares(axis, square) for axis in (conv.height, conv.width)
        )
        self.tall, self.wide = self.height.number // square, self.width.number // square
        height, vectors = matmul_tile(cpu)
        self.tile_vectors = min(vectors, ceil_div(conv.in_channels, cpu.lanes))
        self.panel = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(conv.in_channels, self.panel)
        self.ins = self.panels * self.panel
        self.tile_rows = balanced(conv.out_channels, height)
        self.strips = ceil_div(conv.out_channels, self.tile_rows)
        self.outs = ceil_div(max(self.strips * self.tile_rows, 1), cpu.lanes) * cpu.lanes
        image = 4 * self.cells * (self.ins + self.outs) * self.tall * self.wide
        self.images = max(1, _CHUNK_BYTES // image)
        if isinstance(conv.batch, int):
            self.images = ceil_div(conv.batch, ceil_div(conv.batch, self.images))

    def emit(self, dy, x, dw) -> None:
        size = b.count(self.conv.weight_shape)
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._sum(dy, x, dw))

    def _sum(self, dy, x, dw) -> None:
        conv = self.conv
        number = self.images * self.tall * self.wide
        data, grads = (b.scratch(self.cells * number * each) for each in (self.ins, self.outs))
        sums = b.scratch(self.cells * self.outs * self.ins)
        with b.serial(0, ceil_div(conv.batch, self.images)) as chunk:
            first = bind(chunk * self.images)
            images = bind(tirx.min(const(self.images), conv.batch - first))
            self._transform(dy, x, data, grads, first, images, number)
            with b.parallel(0, self.cells * self.panels) as task:
                cell, panel = bind(task // self.panels), bind(task % self.panels)
                squares = bind(images * (self.tall * self.wide))
                b.either(
                    tirx.EQ(chunk, const(0)),
                    lambda: self._add(data, grads, sums, cell, panel, (squares, number), True),
                    lambda: self._add(data, grads, sums, cell, panel, (squares, number), False),
                )
        self._finish(sums, dw)

    def _transform(self, dy, x, data, grads, first, images, number: int) -> None:
        """Transform all squares of a chunk."""
        conv, square = self.conv, self.square
        parts = ceil_div(self.tall, 4)
        size = ceil_div(self.tall, parts)
        # Of the output gradient, a square is m x m, and nothing lies around it but zeros behind.
        own = [Windows(n, 1, 1, 0, -n % square, 1) for n in conv.out_size]
        transposed = list(zip(*self.transform.result, strict=True))
        with b.parallel(0, images * parts) as task:
            i, row = bind(task // parts), bind(task % parts * size)
            rows = row, bind(tirx.min(const(size), self.tall - row)), size
            at = bind((i * self.tall + row) * self.wide)
            image = bind(first + i)
            self.squares.transform(
                Squares.Source(x, image, conv.in_channels, self.height, self.width),
                self.transform.data,
                rows,
                (data, at, self.ins, number * self.ins),
            )
            self.squares.transform(
                Squares.Source(dy, image, conv.out_channels, *own),
                transposed,
                rows,
                (grads, at, self.outs, number * self.outs),
            )

    def _add(self, data, grads, sums, cell, panel, squares, is_first: bool) -> None:
        """Add the products of a chunk for one element of the squares and one panel of input channels."""
        number, most = squares
        factors = bind(cell * (most * self.ins) + panel * self.panel)
        with b.serial(0, self.strips) as strip:
            out = bind(strip * self.tile_rows)
            values = bind(cell * (most * self.outs) + out)
            place = bind((cell * self.outs + out) * self.ins + panel * self.panel)
            self._tile((data, factors), (grads, values), (sums, place), number, is_first)

    def _tile(self, data, grads, sums, number, is_first: bool) -> None:
        lanes, columns = self.cpu.lanes, self.tile_vectors
        cells = [(i, v) for i in range(self.tile_rows) for v in range(columns)]
        total = Accumulators(self.vectors, len(cells))
        buffer, start = sums
        for index, (i, v) in enumerate(cells):
            place = start + (i * self.ins + v * lanes)
            total[index] = self.vectors.splat(0) if is_first else self.vectors.load(buffer, place)
        with b.serial(0, number) as k:
            factors = [
                bind(self.vectors.load(data[0], data[1] + (k * self.ins + v * lanes)))
                for v in range(columns)
            ]
            for i in range(self.tile_rows):
                value = bind(self.vectors.splat(grads[0][grads[1] + (k * self.outs + i)]))
                for v in range(columns):
                    index = i * columns + v
                    total[index] = total[index] + value * factors[v]
        for index, (i, v) in enumerate(cells):
            self.vectors.store(buffer, start + (i * self.ins + v * lanes), total[index])

    def _finish(self, sums, dw) -> None:
        """Transform the sums to the gradients of the 9 taps."""
        conv, lanes, side = self.conv, self.cpu.lanes, self.side
        transposed = list(zip(*self.transform.weight, strict=True))
        with b.parallel(0, conv.out_channels) as o:
            taps = b.scratch(9 * lanes)
            with b.serial(0, ceil_div(conv.in_channels, lanes)) as block:
                at = bind(o * self.ins + block * lanes)
                cells = [
                    [
                        bind(self.vectors.load(sums, at + (y * side + x) * (self.outs * self.ins)))
                        for x in range(side)
                    ]
                    for y in range(side)
                ]
                self.squares.both(
                    transposed,
                    cells,
                    lambda tap, value: self.vectors.store(taps, tap * lanes, value),
                )
                start = bind((o * conv.in_channels + block * lanes) * 9)
                whole_or_rest(
                    block,
                    conv.in_channels,
                    lanes,
                    lambda channels: self._write(taps, dw, start, channels),
                )

    def _write(self, taps, dw, start, channels: int) -> None:
        """Copy vectors of channels, one for each tap, to the taps of each channel."""
        lanes = self.cpu.lanes
        for first in range(0, 9, lanes):
            number = min(lanes, 9 - first)
            rows = [
                bind(self.vectors.load(taps, (first + i) * lanes))
                if i < number
                else bind(self.vectors.splat(0))
                for i in range(lanes)
            ]
            for c, column in enumerate(self.vectors.transpose(rows)[:channels]):
                self.vectors.store(dw, start + (c * 9 + first), column, number)
