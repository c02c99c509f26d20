"""The weight gradient of depthwise convolution.

As in :mod:`.depthwise`, vectors hold neighbouring channels: X and dY are copied to
``[row][column][channel]``, and a tile holds the sums of some rows of the kernel. A task processes
several images, depending on their size, and one vector of channels. The partial sums of the tasks
are added in the order of the images, so that the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, ceil_div, const
from ..language.halves import Tensor
from ._channels_last import Block, channels_of_taps, pack_channels
from ._chunks import Chunk, Chunks, unless_empty, whole_or_rest
from .depthwise import Gather
from .geometry import Conv2d, Windows

#: The minimum number of elements of dY of a task.
_TASK_ELEMENTS = 1024

#: The number of columns that the body of a loop processes.
_UNROLL = 2


def depthwise_weight(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel: a function of dY, X and dW (float32) that sets dW to the weight gradient.

    Parameters
    ----------
    conv : Conv2d
        The convolution, with as many groups as channels and at most ``depthwise.MOST_TAPS`` taps.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters dY, X and dW, if they differ from the convolution's.
    """
    shapes = shapes or [conv.out_shape, conv.data_shape, conv.weight_shape]
    params = b.floats(("DY", "X", "DW"), shapes)
    return b.prim_func("depthwise_weight", params, _Generator(conv, cpu).emit)


class _Generator:
    def __init__(self, conv: Conv2d, cpu: CPU):
        self.conv, self.lanes, self.channels = conv, cpu.lanes, conv.out_channels
        self.vectors = Vectors(cpu.lanes)
        self.blocks = ceil_div(self.channels, cpu.lanes)
        self.height, self.width = conv.out_size
        self.rows, self.columns = Gather.forward(conv.height), Gather.forward(conv.width)
        self.pitch = self.columns.span(self.width) * cpu.lanes
        self.taps = [(i, j) for i in range(conv.kernel[0]) for j in range(conv.kernel[1])]
        size = max(1, (25 if cpu.registers >= 32 else 10) // conv.kernel[1]) * conv.kernel[1]
        self.tiles = [self.taps[i : i + size] for i in range(0, len(self.taps), size)]
        self.images = max(1, _TASK_ELEMENTS // (self.height * self.width))
        self.tasks = ceil_div(conv.batch, self.images)
        self.chunks = Chunks.of_bytes(
            1,
            self.height,
            lambda rows: 4 * (self.pitch * self.rows.span(rows) + rows * self.width * cpu.lanes),
            cpu.tuning.convolutions.depthwise_weight_chunk,
        )

    def emit(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        size = b.count(self.conv.weight_shape)
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._all(dy, x, dw))

    def _all(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        size = len(self.taps) * self.lanes
        parts = b.scratch(self.tasks * self.blocks * size)
        with b.parallel(0, self.tasks * self.blocks) as task:
            first = bind(task // self.blocks * self.images)
            channel = bind(task % self.blocks * self.lanes)
            images = (
                bind(tirx.min(const(self.images), self.conv.batch - first))
                if self.images > 1
                else 1
            )
            data = b.scratch(self.rows.span(self.chunks.rows) * self.pitch)
            grad = b.scratch(self.chunks.rows * self.width * self.lanes)
            part = bind(task * size)
            with b.serial(0, len(self.taps)) as i:
                self.vectors.store(parts, part + i * self.lanes, self.vectors.splat(0))

            def work(channels: int) -> None:
                with b.serial(0, images) as i:
                    plane = bind((first + i) * self.channels + channel)

                    def sum_up(chunk: Chunk, plane: tirx.PrimExpr = plane) -> None:
                        self._pack(chunk, dy, x, (grad, data), plane, channels)
                        for taps in self.tiles:
                            self._tile(chunk, (grad, data), taps, parts, part)

                    self.chunks.each(sum_up)

            whole_or_rest(channel // self.lanes, self.channels, self.lanes, work)
        with b.parallel(0, self.blocks) as block:
            self._write(parts, dw, block)

    def _pack(
        self,
        chunk: Chunk,
        dy: Tensor,
        x: Tensor,
        buffers: tuple[tirx.Buffer, tirx.Buffer],
        plane: tirx.PrimExpr,
        channels: int,
    ) -> None:
        """Copy some rows of dY, and the rows of X that they are multiplied by."""
        grad, data = buffers
        pack_channels(
            self.vectors,
            Windows(self.width, 1, 1, 0, 0, 1),
            Windows(self.height, 1, 1, 0, 0, 1),
            Block(dy, plane, const(0), channels),
            (chunk.row, chunk.rows),
            (grad, const(0), self.lanes),
        )
        pack_channels(
            self.vectors,
            self.columns.window,
            self.rows.window,
            Block(x, plane, const(0), channels),
            (bind(chunk.row * self.rows.advance), bind(self.rows.span(chunk.rows))),
            (data, const(0), self.lanes),
        )

    def _tile(
        self,
        chunk: Chunk,
        buffers: tuple[tirx.Buffer, tirx.Buffer],
        taps: list[tuple[int, int]],
        parts: tirx.Buffer,
        part: tirx.PrimExpr,
    ) -> None:
        """Add the sums over a chunk to the partial sums of a task."""
        (grad, data), lanes, columns = buffers, self.lanes, self.columns
        down, right = self.conv.dilation
        total = Accumulators(self.vectors, len(taps))
        for i in range(len(taps)):
            total[i] = self.vectors.splat(0)
        with b.serial(0, chunk.rows) as row:
            factor = bind(row * (self.width * lanes))
            source = bind(row * (self.rows.advance * self.pitch))

            def step(
                column: tirx.PrimExpr,
                number: int,
                factor: tirx.PrimExpr = factor,
                source: tirx.PrimExpr = source,
            ) -> None:
                here = bind(factor + column * lanes)
                there = bind(source + column * (columns.advance * lanes))
                for k in range(number):
                    value = bind(self.vectors.load(grad, here + k * lanes))
                    for index, (i, j) in enumerate(taps):
                        place = i * down * self.pitch + (j * right + k * columns.advance) * lanes
                        total[index] = total[index] + self.vectors.load(data, there + place) * value

            if self.width >= _UNROLL:
                with b.serial(0, self.width // _UNROLL) as i:
                    step(bind(i * _UNROLL), _UNROLL)
            if self.width % _UNROLL:
                step(const(self.width - self.width % _UNROLL), self.width % _UNROLL)
        for index, tap in enumerate(taps):
            place = part + self.taps.index(tap) * lanes
            self.vectors.store(parts, place, self.vectors.load(parts, place) + total[index])

    def _write(self, parts: tirx.Buffer, dw: Tensor, block: tirx.PrimExpr) -> None:
        """Add the partial sums of all tasks for a block of channels, and write them to dW."""
        lanes, taps = self.lanes, len(self.taps)
        sums = b.scratch(ceil_div(taps, lanes) * lanes * lanes)
        with b.serial(0, taps) as tap:
            total = Accumulators(self.vectors, 1)
            total[0] = self.vectors.splat(0)
            with b.serial(0, self.tasks) as i:
                place = ((i * self.blocks + block) * taps + tap) * lanes
                total[0] = total[0] + self.vectors.load(parts, place)
            self.vectors.store(sums, tap * lanes, total[0])
        target = bind(block * (lanes * taps))
        whole_or_rest(
            block,
            self.channels,
            lanes,
            lambda channels: channels_of_taps(
                self.vectors, (sums, const(0)), taps, channels, (dw, target)
            ),
        )
