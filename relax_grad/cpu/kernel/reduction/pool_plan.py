"""Plans of pooling and its gradients: tasks of planes, bands of rows of windows, and copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from ...kernel_limits import Reductions
from ...target import CPU
from ..language.builder import ceil_div
from ..language.extents import LINE
from ..language.plans import Plan, extent_as_text
from .pool_geometry import Pool


@dataclass(frozen=True)
class Copied:
    """The copy of a band of a plane with its padding, ``[.., row][phase][column // stride]``, with
    the phase ``column % stride``.

    Attributes
    ----------
    heights : tuple[int, ...]
        The rows along each axis except the last.
    width : int
        The elements of a phase of a row.
    starts : tuple[int, ...]
        The index of the first column of each phase: the vectors that are copied are aligned.
    """

    heights: tuple[int, ...]
    width: int
    starts: tuple[int, ...]

    @property
    def row(self) -> int:
        """The elements of a row."""
        return len(self.starts) * self.width

    @property
    def size(self) -> int:
        """The elements of the copy."""
        return prod(self.heights) * self.row

    def phase(self, phase: int) -> int:
        """Return the index in a row of the first column of a phase."""
        return phase * self.width + self.starts[phase]


@dataclass(frozen=True)
class Gathered:
    """Values of all windows of a plane, which elements gather, with a margin of absent windows
    around them.

    Attributes
    ----------
    firsts, heights : tuple[int, ...]
        The absent windows before the first, and all windows, along each axis except the last.
    left, width : int
        The same along the last axis, where the vectors of windows are aligned.
    """

    firsts: tuple[int, ...]
    heights: tuple[int, ...]
    left: int
    width: int

    @property
    def size(self) -> int:
        """The number of values."""
        return prod(self.heights) * self.width


@dataclass(frozen=True)
class PoolPlan(Plan):
    """The plan of a pooling and of its gradients.

    Attributes
    ----------
    pool : Pool
        The geometry.
    lanes : int
        The elements of a vector.
    tasks : int
        The tasks among which the planes are divided.
    band : int
        The windows of a band along the first axis.
    """

    pool: Pool
    lanes: int
    tasks: int
    band: int

    @property
    def bands(self) -> int:
        """The number of bands of a plane."""
        return ceil_div(self.pool.outer[0].number, self.band)

    @property
    def has_whole_lines(self) -> bool:
        """Whether gradients may be stored past the caches: their rows have whole cache lines."""
        return self.pool.columns.extent % LINE == 0

    @property
    def step(self) -> int:
        """The columns of a vector of each phase."""
        return self.pool.columns.stride * self.lanes

    @cached_property
    def copied(self) -> Copied:
        """The copy of a band of the data."""
        columns, lanes = self.pool.columns, self.lanes
        copied = ceil_div(columns.extent, self.step) * lanes
        copied += ceil_div(columns.before, columns.stride)
        read = ceil_div(columns.number, lanes) * lanes + columns.reach // columns.stride
        copies = [divmod(columns.before + shift, columns.stride) for shift in range(columns.stride)]
        starts = {phase: -column % lanes for column, phase in copies}
        longest = max(copied, read) + max(starts.values())
        first, *others = self.pool.outer
        height = (self.band - 1) * first.stride + first.reach + 1
        return Copied(
            heights=(height, *(axis.length for axis in others)),
            width=ceil_div(longest, lanes) * lanes,
            starts=tuple(starts[phase] for phase in range(columns.stride)),
        )

    @cached_property
    def gathered(self) -> Gathered:
        """The values of windows that elements of the data's gradient gather."""
        (columns, outer), lanes = (self.pool.columns, self.pool.outer), self.lanes
        margins = [axis.margins(ceil_div(axis.extent, axis.stride)) for axis in outer]
        heights = (
            first + axis.number + after for (first, after), axis in zip(margins, outer, strict=True)
        )
        steps = ceil_div(ceil_div(columns.extent, columns.stride), lanes) * lanes
        left, right = columns.margins(steps)
        inner = ceil_div(columns.number, lanes) * lanes
        left = ceil_div(left, lanes) * lanes
        longest = left + max(inner, columns.number + right)
        return Gathered(
            firsts=tuple(first for first, _ in margins),
            heights=tuple(heights),
            left=left,
            width=ceil_div(longest, lanes) * lanes,
        )

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        number, stride = self.pool.outer[0].number, self.pool.columns.stride
        return {
            "tasks": f"{self.tasks}, for {extent_as_text(self.pool.planes)} planes",
            "band": f"{self.band} of {number} windows along the first axis",
            "copy": f"{self.copied.size} elements of a band, in {stride} phases of columns",
            "gradient": f"{self.gathered.size} values of windows, stored past the caches if "
            f"{'large' if self.has_whole_lines else 'rows had whole cache lines'}",
        }


def pool_plan(pool: Pool, cpu: CPU) -> PoolPlan:
    """Return the plan of a pooling and of its gradients."""
    limits = cpu.tuning.reductions
    tasks = limits.pool_tasks * cpu.cores
    if isinstance(pool.planes, int):
        tasks = min(tasks, pool.planes)
    return PoolPlan(pool, cpu.lanes, tasks=tasks, band=_band(pool, cpu.lanes, limits))


def _band(pool: Pool, lanes: int, limits: Reductions) -> int:
    """Return the number of windows of a band along the first axis: all, if their elements stay in
    the first-level cache, or bands would copy many elements again."""
    axis, columns = pool.outer[0], pool.columns
    width = ceil_div(columns.length, columns.stride * lanes) * columns.stride * lanes
    line = 4 * width * prod(other.length for other in pool.outer[1:])
    lines = max(1, limits.pool_band // line)
    most = max(1, (lines - axis.reach - 1) // axis.stride + 1)
    again = max(0, axis.reach + 1 - axis.stride)
    if again > limits.pool_again * most * axis.stride:
        return axis.number
    return ceil_div(axis.number, ceil_div(axis.number, most))
