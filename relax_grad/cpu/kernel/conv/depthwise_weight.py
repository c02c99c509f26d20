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
from ._chunks import Chunk, unless_empty, whole_or_rest
from ._depthwise_plan import DepthwiseWeightPlan, depthwise_weight_plan
from .geometry import Conv2d, Windows


def depthwise_weight(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel: a function of dY, X and dW (float32) that sets dW to the weight gradient.

    Parameters
    ----------
    conv : Conv2d
        The convolution, with as many groups as channels and at most ``plan.MOST_TAPS`` taps.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters dY, X and dW, if they differ from the convolution's.
    """
    shapes = shapes or [conv.out_shape, conv.data_shape, conv.weight_shape]
    params = b.floats(("DY", "X", "DW"), shapes)
    return b.prim_func(
        "depthwise_weight", params, _Generator(depthwise_weight_plan(conv, cpu)).emit
    )


class _Generator:
    def __init__(self, plan: DepthwiseWeightPlan):
        self.plan, self.conv, self.lanes = plan, plan.conv, plan.lanes
        self.vectors = Vectors(plan.lanes)
        self.height, self.width = plan.conv.out_size
        self.rows, self.columns = plan.rows, plan.columns

    def emit(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        size = b.count(self.conv.weight_shape)
        unless_empty(self.conv.batch, dw, size, self.vectors, lambda: self._all(dy, x, dw))

    def _all(self, dy: Tensor, x: Tensor, dw: Tensor) -> None:
        plan, size = self.plan, len(self.plan.taps) * self.lanes
        parts = b.scratch(plan.tasks * plan.blocks * size)
        with b.parallel(0, plan.tasks * plan.blocks) as task:
            first = bind(task // plan.blocks * plan.images)
            channel = bind(task % plan.blocks * self.lanes)
            left = self.conv.batch - first
            images = bind(tirx.min(const(plan.images), left)) if plan.images > 1 else 1
            data = b.scratch(self.rows.span(plan.chunks.rows) * plan.pitch)
            grad = b.scratch(plan.chunks.rows * self.width * self.lanes)
            part = bind(task * size)
            with b.serial(0, len(plan.taps)) as i:
                self.vectors.store(parts, part + i * self.lanes, self.vectors.splat(0))

            def work(channels: int) -> None:
                with b.serial(0, images) as i:
                    plane = bind((first + i) * self.conv.out_channels + channel)

                    def sum_up(chunk: Chunk, plane: tirx.PrimExpr = plane) -> None:
                        self._pack(
                            chunk, dy, x, buffers=(grad, data), plane=plane, channels=channels
                        )
                        for taps in plan.tiles:
                            self._tile(chunk, (grad, data), taps, parts, part)

                    plan.chunks.each(sum_up)

            whole_or_rest(channel // self.lanes, self.conv.out_channels, self.lanes, work)
        with b.parallel(0, plan.blocks) as block:
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
            block=Block(dy, plane, const(0), channels),
            rows=(chunk.row, chunk.rows),
            target=(grad, const(0), self.lanes),
        )
        pack_channels(
            self.vectors,
            self.columns.window,
            self.rows.window,
            block=Block(x, plane, const(0), channels),
            rows=(bind(chunk.row * self.rows.advance), bind(self.rows.span(chunk.rows))),
            target=(data, const(0), self.lanes),
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
        unroll, pitch = self.plan.unroll, self.plan.pitch
        down, right = self.conv.dilation
        total = Accumulators(self.vectors, len(taps))
        for i in range(len(taps)):
            total[i] = self.vectors.splat(0)
        with b.serial(0, chunk.rows) as row:
            factor = bind(row * (self.width * lanes))
            source = bind(row * (self.rows.advance * pitch))

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
                        place = (
                            i * down * self.plan.pitch + (j * right + k * columns.advance) * lanes
                        )
                        total[index] = total[index] + self.vectors.load(data, there + place) * value

            if self.width >= unroll:
                with b.serial(0, self.width // unroll) as i:
                    step(bind(i * unroll), unroll)
            if self.width % unroll:
                step(const(self.width - self.width % unroll), self.width % unroll)
        for index, tap in enumerate(taps):
            place = part + self.plan.taps.index(tap) * lanes
            self.vectors.store(parts, place, self.vectors.load(parts, place) + total[index])

    def _write(self, parts: tirx.Buffer, dw: Tensor, block: tirx.PrimExpr) -> None:
        """Add the partial sums of all tasks for a block of channels, and write them to dW."""
        lanes, taps = self.lanes, len(self.plan.taps)
        sums = b.scratch(ceil_div(taps, lanes) * lanes * lanes)
        with b.serial(0, taps) as tap:
            total = Accumulators(self.vectors, 1)
            total[0] = self.vectors.splat(0)
            with b.serial(0, self.plan.tasks) as i:
                place = ((i * self.plan.blocks + block) * taps + tap) * lanes
                total[0] = total[0] + self.vectors.load(parts, place)
            self.vectors.store(sums, tap * lanes, total[0])
        target = bind(block * (lanes * taps))
        whole_or_rest(
            block,
            self.conv.out_channels,
            lanes,
            lambda channels: channels_of_taps(
                self.vectors, (sums, const(0)), taps, channels, (dw, target)
            ),
        )
