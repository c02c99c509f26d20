"""The weight gradient of convolutions by Winograd's minimal filtering.

This uses the scheme of :mod:`relax_grad.cpu.kernel.winograd`, with the transposes of its transforms
for the output gradient and for the products. For each element of a square, the products form a
matrix of output by input channels, which is summed over all squares of all images. For volumes,
there is such a matrix for each tap along the depth. At the end, these matrices are transformed to
the taps. The errors differ from those of the convolution:
docs/cpu.md lists them too.

The images are processed in chunks, such that all squares of a chunk stay in the last-level cache.
The threads first transform the squares, then each sums some of the matrices. So every sum is in the
order of the squares, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import tirx

from ..target import CPU
from . import builder as b
from ._chunks import Chunk, Chunks, unless_empty, whole_or_rest
from ._pack import channels_of_taps
from ._tile import multiply_add, tile_size
from ._winograd_tiles import Source, Tiles, Transforms, apart, balanced, transposed
from .builder import Extent, Vectors, bind, ceil_div, const
from .convolution import Conv2d, Conv3d
from .winograd import parts_of, transforms_of

#: Bytes of the transformed squares of a chunk: normally, and at most if the sums take as many
#: bytes.
_CHUNK_BYTES, _LARGEST_CHUNK_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024

#: Squares of plain images whose products are summed before they are added to the others.
_STRETCH = 256


def winograd_weight(
    conv: Conv2d | Conv3d,
    cpu: CPU,
    shapes: Sequence[Sequence[Extent]] | None = None,
    square: int = 2,
) -> tirx.PrimFunc:
    """Return the kernel: a function of dY, X and dW (float32) that sets dW to the weight gradient.

    Parameters
    ----------
    conv : Conv2d or Conv3d
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
    def __init__(self, conv: Conv2d | Conv3d, cpu: CPU, square: int):
        self.conv, self.depth = parts_of(conv)
        self.size = b.count(conv.weight_shape)
        self.cpu, self.vectors = cpu, Vectors(cpu.lanes)
        self.transforms = Transforms(self.vectors)
        down, across = transforms_of(self.conv, square)
        self.data_matrices = down.data, across.data
        # The transforms of the output gradient and of the sums are the transposes of those of the
        # convolution's result and weight.
        self.grad_matrices = transposed(down.result), transposed(across.result)
        self.sum_matrices = transposed(down.weight), transposed(across.weight)
        self.cells = down.side * across.side
        self.height = Tiles.of(self.conv.height, down.results)
        self.width = Tiles.of(self.conv.width, across.results)
        self.tall, self.wide = self.height.tall, self.width.wide
        height, vectors = tile_size(cpu)
        conv = self.conv
        self.tile_vectors = min(vectors, ceil_div(conv.in_channels, cpu.lanes))
        self.panel = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(conv.in_channels, self.panel)
        self.ins = self.panels * self.panel
        self.tile_rows = balanced(conv.out_channels, height)
        self.strips = ceil_div(conv.out_channels, self.tile_rows)
        self.outs = ceil_div(max(self.strips * self.tile_rows, 1), cpu.lanes) * cpu.lanes
        self.sum_plane = apart(self.outs * self.ins)
        sums = 4 * self.depth.kernel * self.cells * self.sum_plane
        slices = self.ins * self.depth.size + self.outs * self.depth.number
        row = 4 * self.cells * slices * self.wide
        # Each chunk reads and writes all sums once, so a chunk is at least as large as the sums.
        most = max(_CHUNK_BYTES, min(sums, _LARGEST_CHUNK_BYTES))
        batch = conv.batch * self.height.phases
        self.chunks = Chunks.of_bytes(batch, self.tall, lambda rows: rows * row, most)
        squares = self.chunks.images * self.chunks.rows * self.wide
        self.in_slice, self.out_slice = squares * self.ins, squares * self.outs
        self.in_plane = apart(self.depth.size * self.in_slice)
        self.out_plane = apart(self.depth.number * self.out_slice)

    def emit(self, dy, x, dw) -> None:
        unless_empty(self.conv.batch, dw, self.size, self.vectors, lambda: self._sum(dy, x, dw))

    def _sum(self, dy, x, dw) -> None:
        data, grads = (b.scratch(self.cells * n) for n in (self.in_plane, self.out_plane))
        sums = b.scratch(self.depth.kernel * self.cells * self.sum_plane)

        def add(chunk: Chunk) -> None:
            self._transform(dy, x, data, grads, chunk)
            squares = bind(chunk.images * chunk.rows * self.wide)
            with b.parallel(0, self.depth.kernel * self.cells * self.panels) as task:
                cell, panel = bind(task // self.panels), bind(task % self.panels)
                self._add(data, grads, sums, cell, panel, squares, chunk.is_first)

        self.chunks.each(add)
        self._finish(sums, dw)

    def _transform(self, dy, x, data, grads, chunk: Chunk) -> None:
        """Transform all squares of a chunk."""
        conv, depth = self.conv, self.depth
        parts = ceil_div(self.chunks.rows, 4)
        size = ceil_div(self.chunks.rows, parts)
        slices = max(depth.size, depth.number)
        with b.parallel(0, chunk.images * (slices * parts)) as task:
            i, slice_ = bind(task // (slices * parts)), bind(task // parts % slices)
            row = bind(task % parts * size)
            number_of_rows = bind(tirx.max(const(0), tirx.min(const(size), chunk.rows - row)))
            rows = bind(chunk.row + row), number_of_rows, size
            at = bind((i * self.chunks.rows + row) * self.wide)
            image, phase = self._image(chunk.image + i)

            def of_data() -> None:
                plane = bind(image * (conv.in_channels * depth.size) + slice_)
                self.transforms.transform(
                    Source(x, plane, depth.size, conv.in_channels, self.height, self.width, phase),
                    self.data_matrices,
                    rows,
                    (
                        data,
                        bind(slice_ * self.in_slice + at * self.ins),
                        self.ins,
                        self.in_plane,
                    ),
                )

            def of_grads() -> None:
                plane = bind(image * (conv.out_channels * depth.number) + slice_)
                # Squares of the output gradient have no halo.
                height, width = self.height.of_results, self.width.of_results
                self.transforms.transform(
                    Source(dy, plane, depth.number, conv.out_channels, height, width, phase),
                    self.grad_matrices,
                    rows,
                    (
                        grads,
                        bind(slice_ * self.out_slice + at * self.outs),
                        self.outs,
                        self.out_plane,
                    ),
                )

            for number, emit in ((depth.size, of_data), (depth.number, of_grads)):
                if number == slices:
                    emit()
                else:
                    with b.when(slice_ < number):
                        emit()

    def _image(self, index) -> tuple:
        """Return an image, and the index of one of its interleaved images."""
        phases = self.height.phases
        if phases == 1:
            return bind(index), const(0)
        return bind(index // phases), bind(index % phases)

    def _add(self, data, grads, sums, index, panel, squares, is_first) -> None:
        """Add the products of a chunk for one tap along the depth, one element of the squares, and
        one panel of input channels; ``index`` has the tap and the element."""
        lanes, depth = self.cpu.lanes, self.depth
        tap, cell = bind(index // self.cells), bind(index % self.cells)
        # Slice z of the result reads slice z * stride + shift of the data.
        shift = bind(tap * depth.dilation - depth.before)
        first = bind(tirx.max(const(0), (depth.stride - 1 - shift) // depth.stride))
        last = tirx.min(
            const(depth.number), (depth.size - 1 - shift + depth.stride) // depth.stride
        )
        stop = bind(tirx.max(first, last))
        is_flat = depth.size == depth.number == depth.kernel == 1
        # Terms of plain images are summed in short stretches, whose rounding errors are smaller.
        stretches, most = (ceil_div(squares, _STRETCH), _STRETCH) if is_flat else (1, squares)
        with b.serial(0, self.strips) as strip, b.serial(0, stretches) as stretch:
            begin = bind(stretch * most)
            number = bind(tirx.min(const(_STRETCH), squares - begin)) if is_flat else squares
            out = bind(strip * self.tile_rows)
            values = bind(cell * self.out_plane + begin * self.outs + out)
            factors = bind(cell * self.in_plane + begin * self.ins + panel * self.panel)
            place = bind(index * self.sum_plane + out * self.ins + panel * self.panel)

            def each(step: Callable, values=values, factors=factors, number=number) -> None:
                """Emit the sum over slices and squares."""

                def of_slice(grad, data) -> None:
                    with b.serial(0, number) as k:
                        step((grad + k * self.outs, data + k * self.ins))

                if is_flat:
                    of_slice(values, factors)
                else:
                    with b.serial(first, stop) as z:
                        of_slice(
                            bind(values + z * self.out_slice),
                            bind(factors + (z * depth.stride + shift) * self.in_slice),
                        )

            multiply_add(
                self.vectors,
                (self.tile_rows, self.tile_vectors),
                None,
                lambda i, k: grads[k[0] + i],
                lambda k, v: self.vectors.load(data, k[1] + v * lanes),
                lambda i, v, place=place: (sums, place + (i * self.ins + v * lanes), None),
                add=tirx.Not(tirx.all(is_first, tirx.EQ(begin, const(0)))),
                prefetch=is_flat,
                each=each,
            )

    def _finish(self, sums, dw) -> None:
        """Transform the sums to the gradients of the taps."""
        conv, lanes, slices = self.conv, self.cpu.lanes, self.depth.kernel
        number = prod(conv.kernel)
        with b.parallel(0, conv.out_channels) as o:
            taps = b.scratch(slices * number * lanes)
            with b.serial(0, ceil_div(conv.in_channels, lanes)) as block:
                with b.serial(0, slices) as tap:
                    at = bind(tap * (self.cells * self.sum_plane) + o * self.ins + block * lanes)
                    first = bind(tap * (number * lanes))
                    self.transforms.both(
                        self.sum_matrices,
                        self.transforms.cells(self.sum_matrices, sums, at, self.sum_plane),
                        lambda tap, value, first=first: self.vectors.store(
                            taps, first + tap * lanes, value
                        ),
                    )
                start = bind((o * conv.in_channels + block * lanes) * (slices * number))
                whole_or_rest(
                    block,
                    conv.in_channels,
                    lanes,
                    lambda channels: channels_of_taps(
                        self.vectors,
                        (taps, const(0)),
                        slices * number,
                        channels,
                        (dw, start),
                    ),
                )
