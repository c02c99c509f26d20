"""The weight gradient of a convolution with few input channels, such as the first one of a network.

In :mod:`.weight`, the lanes of a vector are input channels; here, they are output channels.
For each chunk of images, dY is copied to ``[image][row][column][channel]``, and X is copied with
its zero padding. A tile holds the sums of the taps of one row of the kernel, for all input
channels. Each thread computes a range of output channels and of rows of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, const
from ..language.halves import Tensor
from ..matmul.pairs import add_products, imported, joined_widened, only_first, takes_pairs
from ._channels_last import Block, pack_channels, pad_rows
from ._chunks import Chunk, share, unless_empty, whole_or_rest
from ._weight_plan import StemPlan, stem_plan
from .geometry import Conv2d, Windows


def conv_stem(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel: a function of dY, X and dW (float32) that sets dW to the weight gradient.

    Parameters as for :func:`.weight.conv_weight`; there is one group.
    """
    shapes = shapes or [conv.out_shape, conv.data_shape, conv.weight_shape]
    params = b.floats(("DY", "X", "DW"), shapes)

    def emit(dy: Tensor, x: Tensor, dw: Tensor) -> None:
        if takes_pairs(cpu, dy, x):
            with imported():
                _OfPairs(stem_plan(conv, cpu)).emit(dy, x, dw)
        else:
            _Generator(stem_plan(conv, cpu)).emit(dy, x, dw)

    return b.prim_func("conv_stem", params, emit)


class _Generator:
    def __init__(self, plan: StemPlan):
        self.plan, self.conv, self.chunks = plan, plan.conv, plan.chunks
        self.vectors = Vectors(plan.lanes)
        self.taps = {tap: i for i, tap in enumerate(plan.taps)}
        self.rows_read = plan.rows_read(plan.chunks.rows)

    def emit(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        size = b.count(self.conv.weight_shape)
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._divided(dy, x, dw))

    def _divided(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        """Emit the loop over threads, each with a range of output channels and of rows of the
        kernel."""
        kernel_rows, lanes = self.conv.height.kernel, self.plan.lanes
        by_out, by_row = self.plan.parts
        with b.parallel(0, by_out * by_row) as part:
            outs = share(bind(part // by_row), by_out, self.plan.blocks)
            rows = share(bind(part % by_row), by_row, kernel_rows)
            pixels = self.chunks.images * self.chunks.rows * self.conv.width.number
            plane = self.rows_read * self.plan.pitch
            buffers = _Buffers(
                b.scratch(pixels * self.plan.tile_vectors * lanes),
                b.scratch(self.chunks.images * self.conv.in_channels * plane),
                b.scratch(self.plan.out_vectors * kernel_rows * len(self.taps) * lanes),
            )
            with b.serial(0, self.plan.out_vectors * kernel_rows * len(self.taps)) as i:
                self.vectors.store(buffers.sums, i * lanes, self.vectors.splat(0))
            self.chunks.each(
                lambda chunk: self._chunk(chunk, dy, x, buffers=buffers, outs=outs, rows=rows)
            )
            with b.serial(*outs) as block, b.serial(*rows) as row:
                self._write(dw, buffers.sums, block, row)

    def _chunk(
        self,
        chunk: Chunk,
        dy: Tensor,
        x: Tensor,
        buffers: _Buffers,
        outs: tuple[tirx.PrimExpr, tirx.PrimExpr],
        rows: tuple[tirx.PrimExpr, tirx.PrimExpr],
    ) -> None:
        self._pad(chunk, x, buffers)
        with b.serial(*outs) as block:
            vector = bind(block * self.plan.tile_vectors)

            def work(vectors: int) -> None:
                self._pack(chunk, dy, buffers, vector, vectors)
                with b.serial(*rows) as row:
                    for taps in self.plan.groups:
                        self._tile(
                            chunk, buffers, vector, vectors=vectors, kernel_row=row, taps=taps
                        )

            whole_or_rest(block, self.plan.out_vectors, self.plan.tile_vectors, work)

    def _pad(self, chunk: Chunk, x: Tensor, buffers: _Buffers) -> None:
        """Copy the rows of X that a chunk reads."""
        conv = self.conv
        plane, size = self.rows_read * self.plan.pitch, conv.size[0] * conv.size[1]
        with b.serial(0, chunk.images) as i, b.serial(0, conv.in_channels) as c:
            start = bind(((chunk.image + i) * conv.in_channels + c) * size)
            target = bind((i * conv.in_channels + c) * plane)
            rows = bind(chunk.row * conv.height.stride), bind(self.plan.rows_read(chunk.rows))
            pad_rows(
                self.vectors,
                conv.height,
                conv.width,
                source=(x, start),
                rows=rows,
                target=(buffers.x, target, self.plan.pitch),
            )
            self._finish_padding(buffers.x, target, rows[1])

    def _finish_padding(self, x: Tensor, start: tirx.PrimExpr, rows: tirx.PrimExpr) -> None:
        """Emit nothing."""

    def _pack(
        self, chunk: Chunk, dy: Tensor, buffers: _Buffers, vector: tirx.PrimExpr, vectors: int
    ) -> None:
        """Copy the elements of dY of a chunk and a block of output channels."""
        conv, lanes = self.conv, self.plan.lanes
        height, width = (Windows(number, 1, 1, 0, 0, 1) for number in conv.out_size)
        image = self.chunks.rows * conv.width.number * self.plan.tile_vectors
        with b.serial(0, chunk.images) as i, b.serial(0, vectors) as v:
            plane = bind((chunk.image + i) * conv.out_channels)
            channel = bind((vector + v) * lanes)
            pack_channels(
                self.vectors,
                width,
                height,
                block=Block(dy, plane, channel, conv.out_channels),
                rows=(chunk.row, chunk.rows),
                target=(buffers.dy, bind((i * image + v) * lanes), self.plan.tile_vectors * lanes),
            )
            self._finish_packing(buffers.dy, bind((i * image + v) * lanes), chunk.rows)

    def _finish_packing(self, dy: Tensor, start: tirx.PrimExpr, rows: Extent) -> None:
        """Emit nothing."""

    #: Adds a product of vectors to a sum.
    multiply: Callable = staticmethod(lambda total, value, grads: total + value * grads)

    def _each_column(self, step: Callable) -> None:
        """Emit ``step(column, read)`` along a row of dY; ``read`` returns a vector of an element of
        X as it is multiplied."""
        with b.serial(0, self.conv.width.number) as w:
            step(w, lambda vector: vector)

    def _tile(
        self,
        chunk: Chunk,
        buffers: _Buffers,
        vector: tirx.PrimExpr,
        vectors: int,
        kernel_row: tirx.PrimExpr,
        taps: list[tuple[int, int]],
    ) -> None:
        conv, lanes = self.conv, self.plan.lanes
        (down, right), pixel = conv.strides, self.plan.tile_vectors * lanes
        plane = self.rows_read * self.plan.pitch
        cells = [(tap, v) for tap in taps for v in range(vectors)]
        total = Accumulators(self.vectors, len(cells))
        for i in range(len(cells)):
            total[i] = self.vectors.splat(0)
        with b.serial(0, chunk.images) as i, b.serial(0, chunk.rows) as r:
            grad = bind((i * self.chunks.rows + r) * (conv.width.number * pixel))
            row = r * down + kernel_row * conv.dilation[0]
            data = bind(i * (conv.in_channels * plane) + row * self.plan.pitch)

            def step(
                w: tirx.PrimExpr,
                read: Callable,
                grad: tirx.PrimExpr = grad,
                data: tirx.PrimExpr = data,
            ) -> None:
                here, there = bind(grad + w * pixel), bind(data + w * right)
                grads = [
                    bind(self.vectors.load(buffers.dy, here + v * lanes)) for v in range(vectors)
                ]
                for index, ((c, k), v) in enumerate(cells):
                    if v == 0:
                        element = buffers.x[there + (c * plane + k * conv.dilation[1])]
                        value = bind(read(self.vectors.splat(element)))
                    total[index] = self.multiply(total[index], value, grads[v])

            self._each_column(step)
        for index, (tap, v) in enumerate(cells):
            place = self._place(vector + v, kernel_row, self.taps[tap])
            before = self.vectors.load(buffers.sums, place)
            self.vectors.store(buffers.sums, place, before + total[index])

    def _place(self, vector: tirx.PrimExpr, kernel_row: tirx.PrimExpr, tap: int) -> tirx.PrimExpr:
        """Return the index of the sums of a tap."""
        row = vector * self.conv.height.kernel + kernel_row
        return (row * len(self.taps) + tap) * self.plan.lanes

    def _write(
        self, dw: Tensor, sums: tirx.Buffer, block: tirx.PrimExpr, kernel_row: tirx.PrimExpr
    ) -> None:
        """Copy the sums of a block of output channels and a row of the kernel to dW."""
        conv, lanes = self.conv, self.plan.lanes
        width = self.plan.tile_vectors * lanes
        first = bind(block * width)
        with b.serial(0, bind(tirx.min(const(width), conv.out_channels - first))) as i:
            out = bind(first + i)
            source = bind(self._place(out // lanes, kernel_row, 0) + out % lanes)
            with b.serial(0, conv.in_channels) as c, b.serial(0, conv.width.kernel) as k:
                row = (out * conv.in_channels + c) * conv.height.kernel + kernel_row
                value = sums[source + (c * conv.width.kernel + k) * lanes]
                b.store(dw, row * conv.width.kernel + k, value)


class _OfPairs(_Generator):
    """A generator for pairs of bfloat16: the elements of two neighbouring windows.

    Every second column of the copy of dY holds its elements and the next column's. Each element of
    the copy of X is paired with the element that the next window reads.
    """

    multiply = staticmethod(add_products)

    def _finish_padding(self, x: Tensor, start: tirx.PrimExpr, rows: tirx.PrimExpr) -> None:
        """Pair the elements of rows of X."""
        stride, lanes, load = self.conv.strides[1], self.plan.lanes, self.vectors.load
        with b.serial(0, rows) as row:
            here = bind(start + row * self.plan.pitch)

            def pair(i: tirx.PrimExpr, left: Extent | None, here: tirx.PrimExpr = here) -> None:
                rest = tirx.max(const(0), tirx.min(const(lanes), self.plan.pitch - stride - i))
                data = bind(load(x, here + i, left))
                following = bind(load(x, here + stride + i, bind(rest)))
                self.vectors.store(x, here + i, joined_widened(data, following), left)

            self.vectors.each(self.plan.pitch, pair)

    def _finish_packing(self, dy: Tensor, start: tirx.PrimExpr, rows: tirx.PrimExpr) -> None:
        """Pair the columns of rows of a vector of channels."""
        number, pixel = self.conv.width.number, self.plan.tile_vectors * self.plan.lanes
        zero = self.vectors.splat(0)
        with b.serial(0, rows) as row:
            here = bind(start + row * (number * pixel))

            def pair(
                column: tirx.PrimExpr, following: Callable, here: tirx.PrimExpr = here
            ) -> None:
                at = bind(here + column * pixel)
                data = bind(self.vectors.load(dy, at))
                self.vectors.store(dy, at, joined_widened(data, following(at + pixel)))

            with b.serial(0, number // 2) as i:
                pair(i * 2, lambda at: bind(self.vectors.load(dy, at)))
            if number % 2:
                pair(const(number - 1), lambda _: zero)

    def _each_column(self, step: Callable) -> None:
        number = self.conv.width.number
        with b.serial(0, number // 2) as i:
            step(bind(i * 2), lambda vector: vector)
        if number % 2:
            step(const(number - 1), only_first)


@dataclass(frozen=True)
class _Buffers:
    """Copies of dY and of X, and the sums,
    ``[vector of output channels][row of the kernel][tap][channel]``."""

    dy: tirx.Buffer
    x: tirx.Buffer
    sums: tirx.Buffer
