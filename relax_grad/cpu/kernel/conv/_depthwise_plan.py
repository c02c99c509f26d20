"""Plans of depthwise convolutions and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, extent_as_text
from ._chunks import Chunks
from .geometry import Conv2d, Windows

#: The minimum number of elements of a task: of the target, because each task copies the weights
#: once, or of dY.
_TASK_ELEMENTS = 1024

#: Columns of the target that are computed at once: the first of these that divides their number, or
#: the first of all.
_UNROLL = (7, 8, 6, 5, 4)

#: The number of columns that the body of a loop of the weight gradient processes.
_COLUMNS = 2


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

    def units_of(self, phase: int) -> int:
        """Return the number of elements of a phase."""
        return ceil_div(self.target - phase, self.period)

    def span(self, units: Extent) -> Extent:
        """Return the number of source elements that consecutive units span."""
        last = max(offset for phase in self.taps for _, offset in phase)
        return (units - 1) * self.advance + last - self.first + 1

    @property
    def window(self) -> Windows:
        """The range of all source elements that are read, as pointwise windows."""
        span = self.span(self.units)
        return Windows(self.source, span, 1, -self.first, span + self.first - self.source, 1)


@dataclass(frozen=True)
class DepthwisePlan(Plan):
    """The plan of a depthwise convolution, or of its data gradient.

    Attributes
    ----------
    conv : Conv2d
        The convolution.
    rows, columns : Gather
        The reads of the target along both axes.
    lanes : int
        The elements of a vector.
    images : int
        The images of a task, whose rows are processed in chunks.
    chunks : Chunks
        The units of rows that are copied at once.
    """

    conv: Conv2d
    rows: Gather
    columns: Gather
    lanes: int
    images: int
    chunks: Chunks

    @cached_property
    def pitch(self) -> int:
        """The elements of a copied row."""
        return self.columns.span(self.columns.units) * self.lanes

    def columns_at_once(self, phase: int) -> int:
        """Return the columns of a phase that are computed at once."""
        units = self.columns.units_of(phase)
        return next((size for size in _UNROLL if units % size == 0), _UNROLL[0])

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        phases = range(min(self.columns.period, self.columns.target))
        sizes = dict.fromkeys(self.columns_at_once(phase) for phase in phases)
        tasks = ceil_div(self.conv.batch, self.images)
        blocks = ceil_div(self.conv.out_channels, self.lanes)
        return {
            "tile": f"{' or '.join(map(str, sizes))} columns of a vector of channels",
            "block": f"{self.chunks.rows * self.rows.period} rows copied at once",
            "tasks": f"{extent_as_text(tasks)} of {self.images} images x {blocks} vectors",
        }


def depthwise_plan(conv: Conv2d, cpu: CPU, rows: Gather, columns: Gather) -> DepthwisePlan:
    """Return the plan of a depthwise convolution or its data gradient, whose targets read
    ``rows`` and ``columns``."""
    row = 4 * columns.span(columns.units) * cpu.lanes
    images = max(1, _TASK_ELEMENTS // (rows.target * columns.target))
    most = cpu.tuning.convolutions.depthwise_chunk
    chunks = Chunks.of_bytes(1, rows.units, lambda units: row * rows.span(units), most)
    return DepthwisePlan(conv, rows, columns, lanes=cpu.lanes, images=images, chunks=chunks)


@dataclass(frozen=True)
class DepthwiseWeightPlan(Plan):
    """The plan of the weight gradient of a depthwise convolution.

    Attributes
    ----------
    conv : Conv2d
        The convolution.
    lanes : int
        The elements of a vector.
    tile : int
        The most taps of a tile, whole rows of the kernel.
    unroll : int
        The columns that the body of a loop processes.
    images : int
        The images of a task.
    chunks : Chunks
        The rows of dY that are copied at once.
    """

    conv: Conv2d
    lanes: int
    tile: int
    unroll: int
    images: int
    chunks: Chunks

    @cached_property
    def rows(self) -> Gather:
        """The reads of X along the height."""
        return Gather.forward(self.conv.height)

    @cached_property
    def columns(self) -> Gather:
        """The reads of X along the width."""
        return Gather.forward(self.conv.width)

    @property
    def pitch(self) -> int:
        """The elements of a copied row of X."""
        return self.columns.span(self.conv.width.number) * self.lanes

    @cached_property
    def taps(self) -> list[tuple[int, int]]:
        """The taps of the kernel."""
        rows, columns = self.conv.kernel
        return [(i, j) for i in range(rows) for j in range(columns)]

    @property
    def tiles(self) -> list[list[tuple[int, int]]]:
        """The taps of each tile."""
        return [self.taps[i : i + self.tile] for i in range(0, len(self.taps), self.tile)]

    @property
    def blocks(self) -> int:
        """The number of vectors of channels."""
        return ceil_div(self.conv.out_channels, self.lanes)

    @property
    def tasks(self) -> Extent:
        """The number of tasks of a vector of channels."""
        return ceil_div(self.conv.batch, self.images)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        tiles, tasks = [len(taps) for taps in self.tiles], extent_as_text(self.tasks)
        return {
            "tile": f"{tiles[0]} taps of a vector of channels, {len(tiles)} tiles",
            "block": f"{self.chunks.rows} rows of dY copied at once",
            "tasks": f"{tasks} of {self.images} images x {self.blocks} vectors",
        }


def depthwise_weight_plan(conv: Conv2d, cpu: CPU) -> DepthwiseWeightPlan:
    """Return the plan of the weight gradient of a depthwise convolution."""
    (height, width), rows, columns = conv.out_size, *map(Gather.forward, (conv.height, conv.width))
    tile = max(1, (25 if cpu.registers >= 32 else 10) // conv.kernel[1]) * conv.kernel[1]
    pitch = columns.span(width) * cpu.lanes
    chunks = Chunks.of_bytes(
        1,
        height,
        lambda number: 4 * (pitch * rows.span(number) + number * width * cpu.lanes),
        cpu.tuning.convolutions.depthwise_weight_chunk,
    )
    images = max(1, _TASK_ELEMENTS // (height * width))
    return DepthwiseWeightPlan(conv, cpu.lanes, tile, unroll=_COLUMNS, images=images, chunks=chunks)
