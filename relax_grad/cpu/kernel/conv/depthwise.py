"""Depthwise convolution and its data gradient: every channel has its own kernel.

Vectors hold neighbouring channels, so that their lanes are used for any size of planes, strides and
dilations. Rows of the source are copied to ``[row][column][channel]`` with their zero padding. A
row of the target is computed with the channels innermost, and transposed in registers on its way
out. The convolution and its data gradient are the same computation (:class:`Gather`): an element of
the target is a sum over taps of elements of the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, ceil_div, const
from ..language.halves import Tensor
from ._channels_last import Block, pack_channels, taps_of_channels, unpack_row
from ._chunks import Chunk, Chunks, whole_or_rest
from .geometry import Conv2d, Windows

#: The minimum number of target elements of a task, because each task copies the weights once.
_TASK_ELEMENTS = 1024

#: Columns of the target that are computed at once: the first of these that divides their number, or
#: the first of all.
_UNROLL = (7, 8, 6, 5, 4)

#: The maximum number of taps; with more, the code is too long.
MOST_TAPS = 128


@dataclass(frozen=True)
class Gather:
    """The taps and source elements of each target element, along one axis.

    Element ``unit * period + phase`` of the target is the sum over ``taps[phase]``, pairs of a tap
    and an offset, of the tap's weight times element ``unit * advance + offset`` of the source.
    Out-of-bounds elements are 0.

    Attributes
    ----------
    source, target : int
        The extents.
    period, advance : int
        As above.
    taps : tuple[tuple[tuple[int, int], ...], ...]
        As above.
    """

    source: int
    target: int
    period: int
    advance: int
    taps: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def forward(windows: Windows) -> Gather:
        """Return the gather of a convolution:
        ``y[w] = sum over k of x[w * stride + k * dilation - before]``."""
        taps = tuple((k, k * windows.dilation - windows.before) for k in range(windows.kernel))
        return Gather(windows.size, windows.number, 1, windows.stride, (taps,))

    @staticmethod
    def backward(windows: Windows) -> Gather:
        """Return the gather of its data gradient: ``dx[i] = sum over k of dy[(i + before - k *
        dilation) / stride]``.

        Only taps whose division is exact contribute. These taps are periodic in i, with period
        ``stride``.
        """
        stride = windows.stride
        places = [
            [(k, phase + windows.before - k * windows.dilation) for k in range(windows.kernel)]
            for phase in range(stride)
        ]
        taps = tuple(
            tuple((k, place // stride) for k, place in phase if place % stride == 0)
            for phase in places
        )
        return Gather(windows.number, windows.size, stride, 1, taps)

    @property
    def first(self) -> int:
        """The smallest offset."""
        return min(offset for phase in self.taps for _, offset in phase)

    @property
    def units(self) -> int:
        """The number of units of the target; the last one may be incomplete."""
        return ceil_div(self.target, self.period)

    def span(self, units: Extent) -> Extent:
        """Return the number of source elements that consecutive units span."""
        last = max(offset for phase in self.taps for _, offset in phase)
        return (units - 1) * self.advance + last - self.first + 1

    @property
    def window(self) -> Windows:
        """The range of all source elements that are read, as pointwise windows."""
        span = self.span(self.units)
        return Windows(self.source, span, 1, -self.first, span + self.first - self.source, 1)


def depthwise(
    conv: Conv2d, cpu: CPU, shapes: Sequence[Sequence[Extent]] | None = None
) -> tirx.PrimFunc:
    """Return the kernel: a function of X, W and Y (float32) that sets Y to the convolution.

    Parameters
    ----------
    conv : Conv2d
        The convolution, with as many groups as channels and at most ``MOST_TAPS`` taps.
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
    return b.prim_func(
        name, b.floats(*zip(*params, strict=True)), _Generator(conv, cpu, *axes).emit
    )


class _Generator:
    def __init__(self, conv: Conv2d, cpu: CPU, rows: Gather, columns: Gather):
        self.batch, self.channels, self.kernel = conv.batch, conv.out_channels, conv.kernel
        self.rows, self.columns, self.lanes = rows, columns, cpu.lanes
        self.vectors = Vectors(cpu.lanes)
        self.pitch = columns.span(columns.units) * cpu.lanes
        # The images of a task; their rows are processed in chunks.
        self.images = max(1, _TASK_ELEMENTS // (rows.target * columns.target))
        self.chunks = Chunks.of_bytes(
            1,
            rows.units,
            lambda units: 4 * self.pitch * rows.span(units),
            cpu.tuning.convolutions.depthwise_chunk,
        )

    def emit(self, source: Tensor, weight: Tensor, target: Tensor) -> None:
        blocks, taps = ceil_div(self.channels, self.lanes), self.kernel[0] * self.kernel[1]
        with b.parallel(0, ceil_div(self.batch, self.images) * blocks) as task:
            channel = bind(task % blocks * self.lanes)
            weights = b.scratch(taps * self.lanes)
            packed = b.scratch(self.rows.span(self.chunks.rows) * self.pitch)
            line = b.scratch(ceil_div(self.columns.target, self.lanes) * self.lanes * self.lanes)
            first = bind(task // blocks * self.images)
            images = (
                bind(tirx.min(const(self.images), self.batch - first)) if self.images > 1 else 1
            )

            def work(channels: int) -> None:
                place = weight, bind(channel * taps), taps
                for i, tap in enumerate(taps_of_channels(self.vectors, place, taps, channels)):
                    self.vectors.store(weights, i * self.lanes, tap)
                with b.serial(0, images) as i:
                    plane = bind((first + i) * self.channels + channel)
                    self.chunks.each(
                        lambda chunk: self._chunk(
                            chunk, source, target, plane, channels, (weights, packed, line)
                        )
                    )

            whole_or_rest(channel // self.lanes, self.channels, self.lanes, work)

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
            Block(source, plane, const(0), channels),
            (bind(chunk.row * rows.advance), bind(rows.span(chunk.rows))),
            (packed, const(0), self.lanes),
        )
        with b.serial(0, chunk.rows) as unit:
            for phase in range(min(period, rows.target)):
                row = bind((chunk.row + unit) * period + phase)

                def compute(phase: int = phase, row: tirx.PrimExpr = row) -> None:
                    for column_phase in range(min(self.columns.period, self.columns.target)):
                        self._line(unit, phase, column_phase, weights, packed, line)
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
        base = bind(unit * (rows.advance * self.pitch))
        taps = [
            (
                (i * self.kernel[1] + j) * lanes,
                (down - rows.first) * self.pitch + (right - columns.first) * lanes,
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

        units = ceil_div(columns.target - column_phase, columns.period)
        size = next((size for size in _UNROLL if units % size == 0), _UNROLL[0])
        if units >= size:
            with b.serial(0, units // size) as i:
                step(bind(i * size), size)
        if units % size:
            step(const(units - units % size), units % size)
