"""The weight gradient of convolutions with 3x3 kernels by Winograd's minimal filtering.

This uses the scheme of :mod:`relax_grad.cpu.kernel.winograd`, with the transposes of its transforms
for the output gradient and for the products. For each element of a square, the products form a
matrix of output by input channels, which is summed over all squares of all images. At the end,
these matrices are transformed to the 9 taps. The errors differ from those of the convolution:
docs/cpu.md lists them too.

The images are processed in chunks, such that all squares of a chunk stay in the last-level cache.
The threads first transform the squares, then each sums some of the matrices. So every sum is in the
order of the squares, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ..target import CPU
from . import builder as b
from ._chunks import Chunk, Chunks, unless_empty, whole_or_rest
from ._pack import channels_of_taps
from ._tile import multiply_add, tile_size
from .builder import Extent, Vectors, bind, ceil_div, const
from .convolution import Conv2d, Windows
from .winograd import TRANSFORMS, Squares, apart, balanced, whole_squares

#: Bytes of the transformed squares of a chunk: normally, and at most if the sums take as many
#: bytes.
_CHUNK_BYTES, _LARGEST_CHUNK_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024


def winograd_weight(
    conv: Conv2d,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None = None,
    square: int = 2,
) -> tirx.PrimFunc:
    """Return the kernel: a function of dY, X and dW (float32) that sets dW to the weight gradient.

    Parameters
    ----------
    conv : Conv2d
        The convolution; see :func:`relax_grad.cpu.kernel.winograd.is_winograd`.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters dY, X and dW, if they differ from those of the convolution.
    square : int
        The extent of the squares: 2, or 4, which is faster and less accurate.
    """
    shapes = shapes or [conv.out_shape, conv.data_shape, conv.weight_shape]
    params = b.floats(("DY", "X", "DW"), shapes)
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
        height, vectors = tile_size(cpu)
        self.tile_vectors = min(vectors, ceil_div(conv.in_channels, cpu.lanes))
        self.panel = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(conv.in_channels, self.panel)
        self.ins = self.panels * self.panel
        self.tile_rows = balanced(conv.out_channels, height)
        self.strips = ceil_div(conv.out_channels, self.tile_rows)
        self.outs = ceil_div(max(self.strips * self.tile_rows, 1), cpu.lanes) * cpu.lanes
        self.sum_plane = apart(self.outs * self.ins)
        sums = 4 * self.cells * self.sum_plane
        row = 4 * self.cells * (self.ins + self.outs) * self.wide
        # Each chunk reads and writes all sums once, so a chunk is at least as large as the sums.
        most = max(_CHUNK_BYTES, min(sums, _LARGEST_CHUNK_BYTES))
        self.chunks = Chunks.of_bytes(conv.batch, self.tall, lambda rows: rows * row, most)

    def emit(self, dy, x, dw) -> None:
        size = b.count(self.conv.weight_shape)
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._sum(dy, x, dw))

    def _sum(self, dy, x, dw) -> None:
        number = self.chunks.images * self.chunks.rows * self.wide
        self.in_plane, self.out_plane = (
            apart(number * channels) for channels in (self.ins, self.outs)
        )
        data, grads = (b.scratch(self.cells * n) for n in (self.in_plane, self.out_plane))
        sums = b.scratch(self.cells * self.sum_plane)

        def add(chunk: Chunk) -> None:
            self._transform(dy, x, data, grads, chunk)
            squares = bind(chunk.images * chunk.rows * self.wide)
            with b.parallel(0, self.cells * self.panels) as task:
                cell, panel = bind(task // self.panels), bind(task % self.panels)
                self._add(data, grads, sums, cell, panel, squares, chunk.is_first)

        self.chunks.each(add)
        self._finish(sums, dw)

    def _transform(self, dy, x, data, grads, chunk: Chunk) -> None:
        """Transform all squares of a chunk."""
        conv, square = self.conv, self.square
        parts = ceil_div(self.chunks.rows, 4)
        size = ceil_div(self.chunks.rows, parts)
        # Squares of the output gradient are m x m, without a halo; only the end of an axis is
        # padded with zeros.
        own = [Windows(n, 1, 1, 0, -n % square, 1) for n in conv.out_size]
        transposed = list(zip(*self.transform.result, strict=True))
        with b.parallel(0, chunk.images * parts) as task:
            i, row = bind(task // parts), bind(task % parts * size)
            number_of_rows = bind(tirx.max(const(0), tirx.min(const(size), chunk.rows - row)))
            rows = bind(chunk.row + row), number_of_rows, size
            at = bind((i * self.chunks.rows + row) * self.wide)
            image = bind(chunk.image + i)
            self.squares.transform(
                Squares.Source(x, image, conv.in_channels, self.height, self.width),
                self.transform.data,
                rows,
                (data, at, self.ins, self.in_plane),
            )
            self.squares.transform(
                Squares.Source(dy, image, conv.out_channels, *own),
                transposed,
                rows,
                (grads, at, self.outs, self.out_plane),
            )

    def _add(self, data, grads, sums, cell, panel, squares, is_first) -> None:
        """Add the products of a chunk for one element of the squares and one panel of input
        channels."""
        lanes = self.cpu.lanes
        factors = bind(cell * self.in_plane + panel * self.panel)
        with b.serial(0, self.strips) as strip:
            out = bind(strip * self.tile_rows)
            values = bind(cell * self.out_plane + out)
            place = bind(cell * self.sum_plane + out * self.ins + panel * self.panel)
            multiply_add(
                self.vectors,
                (self.tile_rows, self.tile_vectors),
                squares,
                lambda i, k, values=values: grads[values + (k * self.outs + i)],
                lambda k, v: self.vectors.load(data, factors + (k * self.ins + v * lanes)),
                lambda i, v, place=place: (sums, place + (i * self.ins + v * lanes), None),
                add=tirx.Not(is_first),
            )

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
                        bind(self.vectors.load(sums, at + (y * side + x) * self.sum_plane))
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
                    lambda channels: channels_of_taps(
                        self.vectors, (taps, const(0)), 9, channels, (dw, start)
                    ),
                )
