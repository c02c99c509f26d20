"""Depthwise convolution and its data gradient: every channel has its own kernel.

Vectors hold neighbouring channels, so that their lanes are used for any size of planes, strides and
dilations. Rows of the source are copied to ``[row][column][channel]`` with their zero padding. A
row of the target is computed with the channels innermost, and transposed in registers on its way
out. The convolution and its data gradient are the same computation (:class:`Gather`): an element of
the target is a sum over taps of elements of the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, ceil_div, const
from ..language.halves import Tensor
from ._channels_last import Block, pack_channels, taps_of_channels, unpack_row
from ._chunks import Chunk, whole_or_rest
from ._depthwise_plan import DepthwisePlan, Gather, depthwise_plan
from .geometry import Conv2d


def depthwise(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel: a function of X, W and Y (float32) that sets Y to the convolution.

    Parameters
    ----------
    conv : Conv2d
        The convolution, with as many groups as channels and at most ``plan.MOST_TAPS`` taps.
    cpu : CPU
        The target CPU.
    shapes : Sequence, optional
        The shapes of the parameters X, W and Y, if they differ from the convolution's.
    """
    shapes = shapes or [conv.data_shape, conv.weight_shape, conv.out_shape]
    axes = Gather.forward(conv.height), Gather.forward(conv.width)
    return _function("depthwise", conv, cpu, axes, zip(("X", "W", "Y"), shapes, strict=True))


def depthwise_backward_data(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel of the data gradient: a function of dY, W and dX (float32) that sets dX.

    Parameters as for :func:`depthwise`, except the order of the shapes.
    """
    shapes = shapes or [conv.out_shape, conv.weight_shape, conv.data_shape]
    axes = Gather.backward(conv.height), Gather.backward(conv.width)
    names = zip(("DY", "W", "DX"), shapes, strict=True)
    return _function("depthwise_backward_data", conv, cpu, axes, names)


def _function(name: str, conv: Conv2d, cpu: CPU, axes: tuple, params: Iterable) -> tirx.PrimFunc:
    generator = _Generator(depthwise_plan(conv, cpu, *axes))
    return b.prim_func(name, b.floats(*zip(*params, strict=True)), generator.emit)


class _Generator:
    def __init__(self, plan: DepthwisePlan):
        self.plan, self.conv = plan, plan.conv
        self.rows, self.columns, self.lanes = plan.rows, plan.columns, plan.lanes
        self.vectors = Vectors(plan.lanes)

    def emit(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        plan, number = self.plan, self.conv.out_channels
        blocks, taps = ceil_div(number, self.lanes), prod(self.conv.kernel)
        with b.parallel(0, ceil_div(self.conv.batch, plan.images) * blocks) as task:
            channel = bind(task % blocks * self.lanes)
            weights = b.scratch(taps * self.lanes)
            packed = b.scratch(self.rows.span(plan.chunks.rows) * plan.pitch)
            line = b.scratch(ceil_div(self.columns.target, self.lanes) * self.lanes * self.lanes)
            first = bind(task // blocks * plan.images)
            left = self.conv.batch - first
            images = bind(tirx.min(const(plan.images), left)) if plan.images > 1 else 1

            def work(channels: int) -> None:
                place = weight, bind(channel * taps), taps
                for i, tap in enumerate(taps_of_channels(self.vectors, place, taps, channels)):
                    self.vectors.store(weights, i * self.lanes, tap)
                with b.serial(0, images) as i:
                    plane = bind((first + i) * number + channel)
                    plan.chunks.each(
                        lambda chunk: self._chunk(
                            chunk,
                            source,
                            target,
                            plane=plane,
                            channels=channels,
                            buffers=(weights, packed, line),
                        )
                    )

            whole_or_rest(channel // self.lanes, number, self.lanes, work)

    def _chunk(
        self,
        chunk: Chunk,
        source: Tensor,
        target: Tensor,
        plane: tirx.PrimExpr,
        channels: int,
        buffers: tuple[tirx.Buffer, tirx.Buffer, tirx.Buffer],
    ) -> None:
        """Emit some rows of the target."""
        weights, packed, line = buffers
        rows, period = self.rows, self.rows.period
        pack_channels(
            self.vectors,
            self.columns.window,
            rows.window,
            block=Block(source, plane, const(0), channels),
            rows=(bind(chunk.row * rows.advance), bind(rows.span(chunk.rows))),
            target=(packed, const(0), self.lanes),
        )
        with b.serial(0, chunk.rows) as unit:
            for phase in range(min(period, rows.target)):
                row = bind((chunk.row + unit) * period + phase)

                def compute(phase: int = phase, row: tirx.PrimExpr = row) -> None:
                    for column_phase in range(min(self.columns.period, self.columns.target)):
                        self._line(
                            unit, phase, column_phase, weights=weights, packed=packed, line=line
                        )
                    size = self.columns.target
                    start = bind((plane * rows.target + row) * size)
                    unpack_row(
                        self.vectors,
                        (line, const(0)),
                        (target, start, rows.target * size),
                        size,
                        channels,
                    )

                if phase < (rows.target - 1) % period + 1:
                    compute()
                else:
                    with b.when(row < rows.target):
                        compute()

    def _line(
        self,
        unit: tirx.PrimExpr,
        phase: int,
        column_phase: int,
        weights: tirx.Buffer,
        packed: tirx.Buffer,
        line: tirx.Buffer,
    ) -> None:
        """Emit the columns of one phase of a row, channels innermost."""
        rows, columns, lanes = self.rows, self.columns, self.lanes
        base = bind(unit * (rows.advance * self.plan.pitch))
        taps = [
            (
                (i * self.conv.kernel[1] + j) * lanes,
                (down - rows.first) * self.plan.pitch + (right - columns.first) * lanes,
            )
            for i, down in rows.taps[phase]
            for j, right in columns.taps[column_phase]
        ]

        def step(first: tirx.PrimExpr, number: int) -> None:
            start = bind(base + first * (columns.advance * lanes))
            to = bind(first * (columns.period * lanes) + column_phase * lanes)
            total = Accumulators(self.vectors, number)
            for j in range(number):
                total[j] = self.vectors.splat(0)
            for index, offset in taps:
                weight = bind(self.vectors.load(weights, index))
                for j in range(number):
                    place = start + (j * columns.advance * lanes + offset)
                    total[j] = total[j] + self.vectors.load(packed, place) * weight
            for j in range(number):
                self.vectors.store(line, to + j * columns.period * lanes, total[j])

        units = columns.units_of(column_phase)
        size = self.plan.columns_at_once(column_phase)
        if units >= size:
            with b.serial(0, units // size) as i:
                step(bind(i * size), size)
        if units % size:
            step(const(units - units % size), units % size)
