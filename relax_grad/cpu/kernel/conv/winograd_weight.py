"""The weight gradient of convolutions by Winograd's minimal filtering.

This uses the scheme of :mod:`.winograd`, with the transposes of its transforms for the output
gradient and for the products. For each element of a square, the products form a
matrix of output by input channels, which is summed over all squares of all images. For volumes,
there is such a matrix for each tap along the depth. At the end, these matrices are transformed to
the taps. docs/cpu.md lists the
errors, which differ from the convolution's.

The images are processed in chunks, such that all squares of a chunk stay in a cache. If the sums
take few bytes beside all squares, the chunks form parts, and each thread transforms and sums the
squares of its parts: it reads little that others wrote, which takes long between distant cores.
Otherwise, and with fewer parts than threads, the threads first transform the squares of a chunk of
each part, then each sums some of the matrices. The parts depend on the shapes alone, and their sums
are added in order, so that the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod

from tvm import tirx

from ...limits import Convolutions
from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.statements import Emit
from ..language.stealing import shared
from ..matmul.tile import multiply_add
from ._channels_last import channels_of_taps
from ._chunks import Chunk, Chunks, unless_empty, whole_or_rest
from ._winograd_tiles import Source, Tiles, Transforms, apart, balanced, transposed
from .geometry import Conv2d, Conv3d
from .winograd import parts_of, transforms_of

#: The bytes of the chunk of one thread for each byte of the sums, which a chunk reads and writes.
_OWN_SHARE = 4

#: The most parts, and the bytes of all squares for each byte of their sums at least.
_PARTS, _LEAST_SQUARES = 8, 10

#: The maximum number of chunks to try, of which the best-balanced number is chosen; and the time of
#: copying the elements around a row of squares, relative to the time of the row.
_MOST_CHUNKS, _ROW_COST = 256, 0.1

#: The most rows of squares that a task transforms.
_TASK_ROWS = 4

#: Expected number of images of a symbolic batch.
_EXPECTED_IMAGES = 8

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
        The convolution; see :func:`.winograd.is_winograd`.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters dY, X and dW, if they differ from the convolution's.
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
        # The transforms of the output gradient and of the sums are the transposed transforms
        # of the convolution's result and weight.
        self.grad_matrices = transposed(down.result), transposed(across.result)
        self.sum_matrices = transposed(down.weight), transposed(across.weight)
        self.cells = down.side * across.side
        self.matrices = self.depth.kernel * self.cells
        self.height = Tiles.of(self.conv.height, down.results)
        self.width = Tiles.of(self.conv.width, across.results)
        self.tall, self.wide = self.height.tall, self.width.wide
        height, vectors = cpu.tuning.tiles.largest
        conv = self.conv
        self.tile_vectors = min(vectors, ceil_div(conv.in_channels, cpu.lanes))
        self.panel = self.tile_vectors * cpu.lanes
        self.panels = ceil_div(conv.in_channels, self.panel)
        self.ins = self.panels * self.panel
        self.tile_rows = balanced(conv.out_channels, height)
        self.strips = ceil_div(conv.out_channels, self.tile_rows)
        self.outs = ceil_div(max(self.strips * self.tile_rows, 1), cpu.lanes) * cpu.lanes
        self.sum_plane = apart(self.outs * self.ins)
        sums = 4 * self.matrices * self.sum_plane
        slices = self.ins * self.depth.size + self.outs * self.depth.number
        row = 4 * self.cells * slices * self.wide
        self.parts, self.chunks = divide(
            *(conv.batch, self.height.phases, self.tall, row, sums), cpu.tuning.convolutions
        )
        squares = self.chunks.images * self.chunks.rows * self.wide
        self.in_slice, self.out_slice = squares * self.ins, squares * self.outs
        slices = max(self.depth.size, self.depth.number)
        self.transforms_of_chunk = (
            self.chunks.images * slices * ceil_div(self.chunks.rows, _TASK_ROWS)
        )
        self.in_plane = apart(self.depth.size * self.in_slice)
        self.out_plane = apart(self.depth.number * self.out_slice)

    def emit(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        unless_empty(self.conv.batch, dw, self.size, self.vectors, lambda: self._sum(dy, x, dw))

    def _sum(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        sums = b.scratch(self.parts * self.matrices * self.sum_plane)
        parts = bind(tirx.min(const(self.parts), as_expr(self.chunks.number)))
        tensors = dy, x, sums
        # Fewer parts than threads would leave some of these idle.
        if self.parts > 1 and self.parts >= self.cpu.cores:
            with b.parallel(0, parts) as part, b.one_thread():
                self._add_chunks(tensors, parts, part, const(1), 1)
        else:
            self._add_chunks(tensors, parts, const(0), parts, self.parts)
        self._finish(sums, parts, dw)

    def _add_chunks(
        self,
        tensors: tuple,
        parts: tirx.PrimExpr,
        first: tirx.PrimExpr,
        number: tirx.PrimExpr,
        most: int,
    ) -> None:
        """Add the products of the chunks of a number of parts, at most ``most``, from the first one
        on; a chunk of each of them at a time."""
        dy, x, sums = tensors
        data = b.scratch(most * self.cells * self.in_plane)
        grads = b.scratch(most * self.cells * self.out_plane)
        chunks = as_expr(self.chunks.number)

        def start_of(part: tirx.PrimExpr) -> tirx.Var:
            """Return the first chunk of a part."""
            return bind(b.quotient(part * chunks, parts))

        steps = b.quotient(chunks + (parts - 1), parts)
        with b.serial(0, bind(steps)) as step:

            def run_tasks(tasks: Extent, emit: Emit, step: tirx.PrimExpr = step) -> None:
                """Emit ``emit(part, buffers, chunk, task)`` for the tasks of the chunk of each
                part."""
                with shared(number * tasks, self.cpu.cores) as index:
                    own, task = bind(index // tasks), bind(index % tasks)
                    part = bind(first + own)
                    at = bind(start_of(part) + step)
                    buffers = (
                        (data, bind(own * (self.cells * self.in_plane))),
                        (grads, bind(own * (self.cells * self.out_plane))),
                    )
                    with b.when(at < start_of(part + 1)):
                        emit(part, buffers, self.chunks.at(at), task)

            def add(
                part: tirx.PrimExpr,
                buffers: tuple,
                chunk: Chunk,
                task: tirx.PrimExpr,
                step: tirx.PrimExpr = step,
            ) -> None:
                place = sums, bind(part * (self.matrices * self.sum_plane))
                self._add(buffers, place, chunk, task, is_first=tirx.EQ(step, const(0)))

            run_tasks(self.transforms_of_chunk, lambda _, *rest: self._transform((dy, x), *rest))
            run_tasks(self.matrices * self.panels, add)

    def _transform(self, tensors: tuple, buffers: tuple, chunk: Chunk, task: tirx.PrimExpr) -> None:
        """Transform the squares of some rows of a slice of a chunk."""
        (dy, x), ((data, of_data), (grads, of_grads)) = tensors, buffers
        conv, depth = self.conv, self.depth
        parts = ceil_div(self.chunks.rows, _TASK_ROWS)
        size = ceil_div(self.chunks.rows, parts)
        slices = max(depth.size, depth.number)
        i, slice_ = bind(task // (slices * parts)), bind(task // parts % slices)
        with b.when(i < chunk.images):
            row = bind(task % parts * size)
            number_of_rows = bind(tirx.max(const(0), tirx.min(const(size), chunk.rows - row)))
            rows = bind(chunk.row + row), number_of_rows, size
            at = bind((i * self.chunks.rows + row) * self.wide)
            image, phase = self._image(chunk.image + i)

            def transform_data() -> None:
                plane = bind(image * (conv.in_channels * depth.size) + slice_)
                self.transforms.transform(
                    Source(x, plane, depth.size, conv.in_channels, self.height, self.width, phase),
                    self.data_matrices,
                    rows,
                    (
                        data,
                        bind(of_data + slice_ * self.in_slice + at * self.ins),
                        self.ins,
                        self.in_plane,
                    ),
                )

            def transform_grads() -> None:
                plane = bind(image * (conv.out_channels * depth.number) + slice_)
                # Squares of the output gradient have no halo.
                height, width = self.height.of_results, self.width.of_results
                self.transforms.transform(
                    Source(dy, plane, depth.number, conv.out_channels, height, width, phase),
                    self.grad_matrices,
                    rows,
                    (
                        grads,
                        bind(of_grads + slice_ * self.out_slice + at * self.outs),
                        self.outs,
                        self.out_plane,
                    ),
                )

            for number, emit in ((depth.size, transform_data), (depth.number, transform_grads)):
                if number == slices:
                    emit()
                else:
                    with b.when(slice_ < number):
                        emit()

    def _image(self, index: tirx.PrimExpr) -> tuple:
        """Return an image, and the index of one of its interleaved images."""
        phases = self.height.phases
        if phases == 1:
            return bind(index), const(0)
        return bind(index // phases), bind(index % phases)

    def _add(
        self,
        buffers: tuple,
        place_of_sums: tuple,
        chunk: Chunk,
        task: tirx.PrimExpr,
        *,
        is_first: tirx.PrimExpr,
    ) -> None:
        """Add the products of a chunk for one tap along the depth, one element of the squares, and
        one panel of input channels."""
        ((data, of_data), (grads, of_grads)), (sums, of_sums) = buffers, place_of_sums
        index, panel = bind(task // self.panels), bind(task % self.panels)
        squares = bind(chunk.images * chunk.rows * self.wide)
        lanes, depth = self.cpu.lanes, self.depth
        tap, cell = bind(index // self.cells), bind(index % self.cells)
        # Slice z of the result reads slice z * stride + shift of the data.
        shift = bind(tap * depth.dilation - depth.before)
        first = bind(tirx.max(const(0), (depth.stride - 1 - shift) // depth.stride))
        last = tirx.min(
            const(depth.number), (depth.size - 1 - shift + depth.stride) // depth.stride
        )
        stop = bind(tirx.max(first, last))
        is_flat = depth.size == depth.number == depth.kernel == 1 and depth.is_inside
        # Terms of plain images are summed in short stretches, whose rounding errors are smaller.
        stretches, most = (ceil_div(squares, _STRETCH), _STRETCH) if is_flat else (1, squares)
        with b.serial(0, self.strips) as strip, b.serial(0, stretches) as stretch:
            begin = bind(stretch * most)
            number = bind(tirx.min(const(_STRETCH), squares - begin)) if is_flat else squares
            out = bind(strip * self.tile_rows)
            values = bind(of_grads + cell * self.out_plane + begin * self.outs + out)
            factors = bind(of_data + cell * self.in_plane + begin * self.ins + panel * self.panel)
            place = bind(of_sums + index * self.sum_plane + out * self.ins + panel * self.panel)

            def each(
                step: Callable,
                values: tirx.PrimExpr = values,
                factors: tirx.PrimExpr = factors,
                number: tirx.PrimExpr = number,
            ) -> None:
                """Emit the sum over slices and squares."""

                def of_slice(grad: tirx.PrimExpr, data: tirx.PrimExpr) -> None:
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

    def _finish(self, sums: tirx.Buffer, parts: tirx.PrimExpr, dw: Tensor) -> None:
        """Add the sums of all parts, and transform them to the gradients of the taps."""
        conv, lanes, slices = self.conv, self.cpu.lanes, self.depth.kernel
        number = prod(conv.kernel)
        with b.parallel(0, conv.out_channels) as o:
            taps = b.scratch(ceil_div(slices * number, lanes) * lanes * lanes)
            if self.parts > 1:
                totals, plane, row = b.scratch(self.matrices * self.ins), self.ins, const(0)
                self._add_parts(sums, parts, o, totals)
            else:
                totals, plane, row = sums, self.sum_plane, bind(o * self.ins)
            with b.serial(0, ceil_div(conv.in_channels, lanes)) as block:
                with b.serial(0, slices) as tap:
                    at = bind(tap * (self.cells * plane) + row + block * lanes)
                    first = bind(tap * (number * lanes))
                    self.transforms.both(
                        self.sum_matrices,
                        self.transforms.cells(self.sum_matrices, totals, at, plane),
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

    def _add_parts(
        self, sums: tirx.Buffer, parts: tirx.PrimExpr, out: tirx.PrimExpr, totals: tirx.Buffer
    ) -> None:
        """Add the sums of all parts for an output channel, ``[plane][input channel]``."""
        lanes = self.cpu.lanes
        with b.serial(0, self.matrices) as i, b.serial(0, self.ins // lanes) as v:
            place = bind(i * self.sum_plane + out * self.ins + v * lanes)
            total = Accumulators(self.vectors, 1)
            total[0] = self.vectors.load(sums, place)
            with b.serial(1, parts) as part:
                at = part * (self.matrices * self.sum_plane) + place
                total[0] = total[0] + self.vectors.load(sums, at)
            self.vectors.store(totals, i * self.ins + v * lanes, total[0])


def divide(
    batch: Extent, phases: int, height: int, row: int, sums: int, limits: Convolutions
) -> tuple[int, Chunks]:
    """Return the number of parts, and the chunks. They do not depend on the number of threads.

    Parameters
    ----------
    batch : int or tirx.PrimExpr
        The number of images.
    phases, height : int
        The number of interleaved images of each, and the rows of squares of these.
    row, sums : int
        The bytes of a row of squares, and of the sums of a part.
    limits : Convolutions
        The sizes of chunks.
    """
    least, most_own = limits.winograd_own
    is_known = isinstance(batch, int)
    images = (batch if is_known else _EXPECTED_IMAGES) * phases
    squares = images * height * row
    most = min(_PARTS, images * height, squares // (_LEAST_SQUARES * sums))
    if most < 2 or sums > most_own // 3:
        # Each chunk reads and writes all sums once, so a chunk is at least as large as the sums.
        shared_bytes, largest = limits.winograd_shared
        most = max(shared_bytes, min(sums, largest))
        return 1, Chunks.of_bytes(batch * phases, height, lambda rows: rows * row, most)
    parts = 1 << (most.bit_length() - 1)
    size = max(least, min(_OWN_SHARE * sums, most_own))
    rows = max(1, min(size // row, images * height // parts))
    # More chunks may be more even shares.
    whole, tall = rows // height, ceil_div(height, rows)
    choices = [
        *(
            Chunks(images, height, ceil_div(images, number), height)
            for number in (range(ceil_div(images, whole), images + 1)[:parts] if whole else ())
        ),
        *(
            Chunks(images, height, 1, ceil_div(height, number))
            for number in range(tall, height + 1)[: 2 * parts]
        ),
    ]
    if choices[0].number > _MOST_CHUNKS:
        best = choices[0]
    else:
        best = min(choices, key=lambda chunks: _longest(chunks, parts) + _ROW_COST / chunks.rows)
    if is_known:
        return min(parts, best.number), best
    return parts, replace(best, batch=batch * phases)


def _longest(chunks: Chunks, parts: int) -> float:
    """Return the largest share of one of two, four and eight threads, each relative to equal
    shares, on average."""
    number = chunks.number
    parts = min(parts, number)
    sizes = [
        min(chunks.images, chunks.batch - i) * min(chunks.rows, chunks.height - j)
        for i in range(0, chunks.batch, chunks.images)
        for j in range(0, chunks.height, chunks.rows)
    ]
    until = [0, *accumulate(sizes)]
    longest = []
    for threads in (2, 4, 8):
        # The runtime gives each thread but the last ones the same number of parts.
        of_thread = ceil_div(parts, threads)
        stops = [min(i * of_thread, parts) * number // parts for i in range(threads + 1)]
        shares = [until[stop] - until[start] for start, stop in pairwise(stops)]
        longest.append(max(shares) * threads / until[-1])
    return sum(longest) / len(longest)
