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
from math import prod

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.statements import Emit
from ..language.stealing import shared
from ..matmul.tile import multiply_add
from ._channels_last import channels_of_taps
from ._chunks import Chunk, unless_empty, whole_or_rest
from ._winograd_tiles import Source, Transforms
from ._winograd_weight_plan import WinogradWeightPlan, winograd_weight_plan
from .geometry import Conv2d, Conv3d


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
    plan = winograd_weight_plan(conv, cpu, square)
    return b.prim_func("winograd_weight", params, _Generator(plan).emit)


class _Generator:
    def __init__(self, plan: WinogradWeightPlan):
        self.plan, self.squares = plan, plan.squares
        self.conv, self.depth, self.chunks = plan.conv, plan.depth, plan.chunks
        self.vectors = Vectors(plan.lanes)
        self.transforms = Transforms(self.vectors)
        self.height, self.width = self.squares.height, self.squares.width
        self.wide, self.cells = self.squares.wide, self.squares.cells
        self.grad_matrices, self.sum_matrices = self.squares.of_grads, self.squares.of_sums

    def emit(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        size = b.count(self.conv.weight_shape) * self.depth.kernel
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._sum(dy, x, dw))

    def _sum(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        sums = b.scratch(self.plan.parts * self.plan.matrices * self.plan.sum_plane)
        parts = bind(tirx.min(const(self.plan.parts), as_expr(self.chunks.number)))
        tensors = dy, x, sums
        if self.plan.sums_own:
            with b.parallel(0, parts) as part, b.one_thread():
                self._add_chunks(tensors, parts, part, const(1), 1)
        else:
            self._add_chunks(tensors, parts, const(0), parts, self.plan.parts)
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
        data = b.scratch(most * self.cells * self.plan.in_plane)
        grads = b.scratch(most * self.cells * self.plan.out_plane)
        chunks = as_expr(self.chunks.number)

        def start_of(part: tirx.PrimExpr) -> tirx.Var:
            """Return the first chunk of a part."""
            return bind(b.quotient(part * chunks, parts))

        steps = b.quotient(chunks + (parts - 1), parts)
        with b.serial(0, bind(steps)) as step:

            def run_tasks(tasks: Extent, emit: Emit, step: tirx.PrimExpr = step) -> None:
                """Emit ``emit(part, buffers, chunk, task)`` for the tasks of the chunk of each
                part."""
                with shared(number * tasks, self.plan.cores) as index:
                    own, task = bind(index // tasks), bind(index % tasks)
                    part = bind(first + own)
                    at = bind(start_of(part) + step)
                    buffers = (
                        (data, bind(own * (self.cells * self.plan.in_plane))),
                        (grads, bind(own * (self.cells * self.plan.out_plane))),
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
                place = sums, bind(part * (self.plan.matrices * self.plan.sum_plane))
                self._add(buffers, place, chunk, task, is_first=tirx.EQ(step, const(0)))

            run_tasks(
                self.plan.transforms_of_chunk, lambda _, *rest: self._transform((dy, x), *rest)
            )
            run_tasks(self.plan.matrices * self.plan.panels, add)

    def _transform(self, tensors: tuple, buffers: tuple, chunk: Chunk, task: tirx.PrimExpr) -> None:
        """Transform the squares of some rows of a slice of a chunk."""
        (dy, x), ((data, of_data), (grads, of_grads)) = tensors, buffers
        conv, depth = self.conv, self.depth
        parts, size, slices = self.plan.row_tasks, self.plan.task_rows, self.plan.slices
        i, slice_ = bind(task // (slices * parts)), bind(task // parts % slices)
        with b.when(i < chunk.images):
            row = bind(task % parts * size)
            number_of_rows = bind(tirx.max(const(0), tirx.min(const(size), chunk.rows - row)))
            rows = bind(chunk.row + row), number_of_rows, size
            at = bind((i * self.chunks.rows + row) * self.wide)
            image, phase = self.squares.image(chunk.image + i)

            def transform_data() -> None:
                plane = bind(image * (conv.in_channels * depth.size) + slice_)
                self.transforms.transform(
                    Source(
                        x,
                        plane,
                        depth.size,
                        channels=conv.in_channels,
                        height=self.height,
                        width=self.width,
                        phase=phase,
                    ),
                    self.squares.of_data,
                    rows,
                    (
                        data,
                        bind(of_data + slice_ * self.plan.in_slice + at * self.plan.ins),
                        self.plan.ins,
                        self.plan.in_plane,
                    ),
                )

            def transform_grads() -> None:
                plane = bind(image * (conv.out_channels * depth.number) + slice_)
                # Squares of the output gradient have no halo.
                height, width = self.height.of_results, self.width.of_results
                self.transforms.transform(
                    Source(
                        dy,
                        plane,
                        depth.number,
                        channels=conv.out_channels,
                        height=height,
                        width=width,
                        phase=phase,
                    ),
                    self.grad_matrices,
                    rows,
                    (
                        grads,
                        bind(of_grads + slice_ * self.plan.out_slice + at * self.plan.outs),
                        self.plan.outs,
                        self.plan.out_plane,
                    ),
                )

            for number, emit in ((depth.size, transform_data), (depth.number, transform_grads)):
                if number == slices:
                    emit()
                else:
                    with b.when(slice_ < number):
                        emit()

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
        index, panel = bind(task // self.plan.panels), bind(task % self.plan.panels)
        squares = bind(chunk.images * chunk.rows * self.wide)
        lanes, depth = self.plan.lanes, self.depth
        tap, cell = bind(index // self.cells), bind(index % self.cells)
        # Slice z of the result reads slice z * stride + shift of the data.
        shift = bind(tap * depth.dilation - depth.before)
        first = bind(tirx.max(const(0), (depth.stride - 1 - shift) // depth.stride))
        last = tirx.min(
            const(depth.number), (depth.size - 1 - shift + depth.stride) // depth.stride
        )
        stop = bind(tirx.max(first, last))
        of, is_flat = self.plan.stretch, self.plan.stretch > 0
        stretches, most = (ceil_div(squares, of), of) if is_flat else (1, squares)
        with b.serial(0, self.plan.strips) as strip, b.serial(0, stretches) as stretch:
            begin = bind(stretch * most)
            number = bind(tirx.min(const(of), squares - begin)) if is_flat else squares
            out = bind(strip * self.plan.tile_rows)
            values = bind(of_grads + cell * self.plan.out_plane + begin * self.plan.outs + out)
            factors = bind(
                of_data
                + cell * self.plan.in_plane
                + begin * self.plan.ins
                + panel * self.plan.panel
            )
            place = bind(
                of_sums
                + index * self.plan.sum_plane
                + out * self.plan.ins
                + panel * self.plan.panel
            )

            def each(
                step: Callable,
                values: tirx.PrimExpr = values,
                factors: tirx.PrimExpr = factors,
                number: tirx.PrimExpr = number,
            ) -> None:
                """Emit the sum over slices and squares."""

                def of_slice(grad: tirx.PrimExpr, data: tirx.PrimExpr) -> None:
                    with b.serial(0, number) as k:
                        step((grad + k * self.plan.outs, data + k * self.plan.ins))

                if is_flat:
                    of_slice(values, factors)
                else:
                    with b.serial(first, stop) as z:
                        of_slice(
                            bind(values + z * self.plan.out_slice),
                            bind(factors + (z * depth.stride + shift) * self.plan.in_slice),
                        )

            multiply_add(
                self.vectors,
                (self.plan.tile_rows, self.plan.tile_vectors),
                None,
                value=lambda i, k: grads[k[0] + i],
                vector=lambda k, v: self.vectors.load(data, k[1] + v * lanes),
                place=lambda i, v, place=place: (
                    sums,
                    place + (i * self.plan.ins + v * lanes),
                    None,
                ),
                add=tirx.Not(tirx.all(is_first, tirx.EQ(begin, const(0)))),
                prefetch=is_flat,
                each=each,
            )

    def _finish(self, sums: tirx.Buffer, parts: tirx.PrimExpr, dw: Tensor) -> None:
        """Add the sums of all parts, and transform them to the gradients of the taps."""
        conv, lanes, slices = self.conv, self.plan.lanes, self.depth.kernel
        number = prod(conv.kernel)
        with b.parallel(0, conv.out_channels) as o:
            taps = b.scratch(ceil_div(slices * number, lanes) * lanes * lanes)
            if self.plan.parts > 1:
                totals, plane, row = (
                    b.scratch(self.plan.matrices * self.plan.ins),
                    self.plan.ins,
                    const(0),
                )
                self._add_parts(sums, parts, o, totals)
            else:
                totals, plane, row = sums, self.plan.sum_plane, bind(o * self.plan.ins)
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
        lanes = self.plan.lanes
        with b.serial(0, self.plan.matrices) as i, b.serial(0, self.plan.ins // lanes) as v:
            place = bind(i * self.plan.sum_plane + out * self.plan.ins + v * lanes)
            total = Accumulators(self.vectors, 1)
            total[0] = self.vectors.load(sums, place)
            with b.serial(1, parts) as part:
                at = part * (self.plan.matrices * self.plan.sum_plane) + place
                total[0] = total[0] + self.vectors.load(sums, at)
            self.vectors.store(totals, i * self.plan.ins + v * lanes, total[0])
