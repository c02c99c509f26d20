"""Common parts of the pooling kernels: the loops over planes and windows, padded copies of planes,
and sums over windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from math import prod

from tvm import tirx

from ..language import builder as b
from ..language.builder import Accumulators, Vectors, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.streams import are_large, fence, stream, streams
from .pool_geometry import Pool, flat
from .pool_plan import PoolPlan

#: The mask of a float32's magnitude bits, and the bits of infinity, the smallest ones of a number
#: that is not finite.
_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000


@dataclass(frozen=True)
class Band:
    """Consecutive windows along the first axis of a pooling.

    Attributes
    ----------
    first, end : tirx.PrimExpr
        The first window, and the end of the range.
    size, number : int
        The windows of all bands but the last, and of the whole axis.
    """

    first: tirx.PrimExpr
    end: tirx.PrimExpr
    size: int
    number: int

    @property
    def is_whole(self) -> bool:
        return self.size == self.number


@contextmanager
def each_plane(plan: PoolPlan, streamed: bool | tirx.PrimExpr = False) -> Iterator[Callable]:
    """Emit the loop over tasks, and yield a function that emits the loop over the planes of a task.

    The tasks may store past the caches unless ``streamed`` is false.
    """
    may_stream, planes, tasks = streamed is not False, plan.pool.planes, plan.tasks
    with streams(plan.lanes) if may_stream else nullcontext(), b.parallel(0, tasks) as task:
        first, last = bind(task * planes // tasks), bind((task + 1) * planes // tasks)
        yield lambda: b.serial(first, last)
        if may_stream:
            fence(plan.lanes)


def is_streamed(plan: PoolPlan, tensors: Sequence[tirx.Buffer]) -> bool | tirx.PrimExpr:
    """Tell whether a gradient is stored past the caches: if it and the other tensors are too large
    for them, and its rows have whole lines; a condition if their sizes are symbolic."""
    return plan.has_whole_lines and are_large(tensors)


@contextmanager
def each_band(plan: PoolPlan) -> Iterator[Band]:
    """Emit the loop over bands of windows along the first axis, and yield the band."""
    number, size = plan.pool.outer[0].number, plan.band
    if size == number:
        yield Band(const(0), const(number), size, number)
        return
    with b.serial(0, plan.bands) as i:
        first = bind(i * size)
        yield Band(first, bind(tirx.min(first + size, const(number))), size, number)


@contextmanager
def each_row_of_windows(pool: Pool, band: Band) -> Iterator[Sequence[tirx.Var]]:
    """Emit the loops over the windows of a band along all axes except the last, and yield their
    indices."""
    with (
        b.serial(band.first, band.end) as first,
        _loops([axis.number for axis in pool.outer[1:]]) as others,
    ):
        yield [first, *others]


class Source:
    """A copy of a padded band of a plane.

    Parameters
    ----------
    plan : PoolPlan
        The geometry, and the layout of the copy.
    vectors : Vectors
        The vectors.
    padding : float
        The value of the padding.
    """

    def __init__(self, plan: PoolPlan, vectors: Vectors, padding: float):
        self._plan, self._pool, self._of = plan, plan.pool, plan.copied
        self._vectors, self._padding = vectors, padding
        self._first: tirx.PrimExpr = const(0)
        self._buffer = filled(vectors, self._of.size, padding)
        self._largest = Accumulators(Vectors(vectors.lanes, "int32"), 1)

    def taps(self, at: Sequence, j: tirx.PrimExpr) -> Iterator[tirx.PrimExpr]:
        """Yield, for each tap in row-major order, the vector of its elements in the windows from
        ``(*at, j)`` on."""
        columns = self._pool.columns
        for taps in self._pool.outer_taps():
            local = [at[0] - self._first, *at[1:]]
            place = [
                i * axis.stride + t * axis.dilation
                for i, t, axis in zip(local, taps, self._pool.outer, strict=True)
            ]
            row = bind(flat(place, self._of.heights) * self._of.row + j)
            for u in range(columns.size):
                column, phase = divmod(u * columns.dilation, columns.stride)
                yield bind(self._vectors.load(self._buffer, row + (self._of.phase(phase) + column)))

    def fill(self, x: tirx.Buffer, plane: tirx.PrimExpr, band: Band) -> None:
        """Copy the elements of the windows of a band of a plane."""
        axis = self._pool.outer[0]
        self._largest[0] = tirx.Broadcast(const(0), self._vectors.lanes)
        self._first = band.first
        if band.is_whole:
            with b.serial(0, axis.copied) as i:
                self._lines(x, plane, i, bind(i + axis.before))
            return
        before = bind(band.first * axis.stride - axis.before)
        number = bind((band.end - 1) * axis.stride + axis.reach + 1 - band.first * axis.stride)
        has_padding = axis.before > 0 or axis.length - axis.before > axis.extent
        with b.serial(0, number) as line:
            i = bind(before + line)
            if not has_padding:
                self._lines(x, plane, i, line)
            else:
                is_inside = tirx.all(i >= 0, i < axis.extent)
                b.either(
                    is_inside,
                    lambda: self._lines(x, plane, i, line),
                    lambda: self._pad(line),
                )

    def _lines(
        self, x: tirx.Buffer, plane: tirx.PrimExpr, i: tirx.PrimExpr, line: tirx.PrimExpr
    ) -> None:
        """Copy the elements with an index along the first axis to a line of the band."""
        pool, columns, lanes = self._pool, self._pool.columns, self._vectors.lanes
        others = pool.outer[1:]
        with _loops([axis.copied for axis in others]) as at:
            place = [line, *(i + axis.before for i, axis in zip(at, others, strict=True))]
            target = bind(flat(place, self._of.heights) * self._of.row)
            source = pool.row(plane, [i, *at])
            whole, rest = divmod(columns.extent, self._plan.step)
            with b.serial(0, whole) as m:
                self._copy(x, source + m * self._plan.step, target + m * lanes, self._plan.step)
            if rest:
                self._copy(x, source + whole * self._plan.step, target + whole * lanes, rest)

    def _pad(self, line: tirx.PrimExpr) -> None:
        """Fill a line of the band with padding."""
        size, vectors = prod(self._of.heights[1:]) * self._of.row, self._vectors
        start = bind(line * size)
        padding = vectors.splat(self._padding)
        vectors.each(size, lambda at, n: vectors.store(self._buffer, start + at, padding, n))

    def is_finite(self) -> tirx.PrimExpr:
        """Return the condition that the copied plane has neither infinities nor NaN."""
        integers = Vectors(self._vectors.lanes, "int32")
        largest = integers.fold(bind(self._largest[0]), tirx.max)
        return tirx.LT(largest, const(_INFINITE))

    def _copy(self, x: Tensor, source: tirx.PrimExpr, target: tirx.PrimExpr, number: int) -> None:
        """Copy columns to their phases."""
        vectors, columns, lanes = self._vectors, self._pool.columns, self._vectors.lanes
        parts = []
        for i in range(columns.stride):
            left = min(lanes, number - i * lanes)
            if left <= 0:
                parts.append(vectors.splat(self._padding))
                continue
            part = bind(vectors.load(x, source + i * lanes, left))
            magnitude = tirx.reinterpret(f"int32x{lanes}", part) & tirx.Broadcast(
                const(_MAGNITUDE), lanes
            )
            self._largest[0] = tirx.max(self._largest[0], magnitude)
            parts.append(bind(vectors.only(part, left, self._padding)))
        for shift, part in enumerate(vectors.deinterleave(parts)):
            column, phase = divmod(columns.before + shift, columns.stride)
            vectors.store(self._buffer, target + (self._of.phase(phase) + column), part)


class Shares:
    """Values of windows that elements gather, with a margin of absent windows around them.

    Parameters
    ----------
    plan, vectors
        As for :class:`Source`.
    streamed : bool or tirx.PrimExpr
        Whether the sums are stored past the caches.
    """

    def __init__(self, plan: PoolPlan, vectors: Vectors, streamed: bool | tirx.PrimExpr):
        self._plan, self._pool, self._of = plan, plan.pool, plan.gathered
        self._vectors, self._streamed = vectors, streamed
        self.integers = Vectors(vectors.lanes, "int32")

    def buffer(self, vectors: Vectors, value: float) -> tirx.Buffer:
        """Allocate one element for each window; elements of absent windows hold ``value``."""
        return filled(vectors, self._of.size, value)

    def at(self, at: Sequence, j: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the index of a window."""
        place = [i + first for i, first in zip(at, self._of.firsts, strict=True)]
        return flat(place, self._of.heights) * self._of.width + self._of.left + j

    def gather(self, dx: tirx.Buffer, plane: tirx.PrimExpr, band: Band, share: Callable) -> None:
        """Emit the sums of ``share(index, tap)`` over the windows that each element belongs to, for
        the elements that belong to no windows after the band, and that were not summed yet."""
        outer = self._pool.outer
        first, *others = (ceil_div(axis.extent, axis.stride) for axis in outer)
        start, end = const(0), const(first)
        if not band.is_whole:
            ahead = outer[0].ahead
            start, end = (
                bind(tirx.max(const(0), tirx.min(at - ahead, const(first))))
                for at in (band.first, band.end)
            )
            is_last = tirx.EQ(band.end, const(band.number))
            end = bind(tirx.Select(is_last, const(first), end))
        with b.serial(start, end) as step, _loops(others) as rest:
            at = [step, *rest]
            for phases in product(*(range(axis.stride) for axis in outer)):
                with ExitStack() as stack:
                    place = []
                    for i, phase, axis in zip(at, phases, outer, strict=True):
                        place.append(bind(i * axis.stride + phase))
                        if phase >= (axis.extent - 1) % axis.stride + 1:
                            stack.enter_context(b.when(place[-1] < axis.extent))
                    self._row(dx, self._pool.row(plane, place), at, phases, share)

    def _row(
        self,
        dx: tirx.Buffer,
        base: tirx.PrimExpr,
        at: Sequence,
        phases: Sequence[int],
        share: Callable,
    ) -> None:
        columns, lanes = self._pool.columns, self._vectors.lanes
        step = self._plan.step
        whole, rest = divmod(columns.extent, step)
        with b.serial(0, whole) as m:
            self._store(dx, base + m * step, self._sums(at, phases, bind(m * lanes), share), step)
        if rest:
            sums = self._sums(at, phases, const(whole * lanes), share)
            self._store(dx, base + whole * step, sums, rest)

    def _sums(self, at: Sequence, phases: Sequence[int], j: tirx.PrimExpr, share: Callable) -> list:
        """Return the sums of a row from step ``j`` on, as a vector for each phase of the
        columns."""
        columns = self._pool.columns
        sums = []
        for column_phase in range(columns.stride):
            total = Accumulators(self._vectors, 1)
            total[0] = self._vectors.splat(0)
            pairs = [axis.taps(phase) for axis, phase in zip(self._pool.outer, phases, strict=True)]
            for outer in product(*pairs):
                taps = [t for t, _ in outer]
                place = [i + far for i, (_, far) in zip(at, outer, strict=True)]
                start = bind(self.at(place, j))
                for u, far in columns.taps(column_phase):
                    total[0] = total[0] + share(start + far, self._pool.tap(taps, u))
            sums.append(total[0])
        return sums

    def _store(self, dx: Tensor, start: tirx.PrimExpr, sums: Sequence, number: int) -> None:
        vectors, lanes = self._vectors, self._vectors.lanes
        for k, part in enumerate(vectors.interleave(sums)):
            left = min(lanes, number - k * lanes)
            if left >= lanes and self._streamed is not False:
                stream(dx, start + k * lanes, part, lanes, self._streamed)
            elif left > 0:
                vectors.store(dx, start + k * lanes, part, left)


def filled(vectors: Vectors, size: int, value: float) -> tirx.Buffer:
    """Allocate a buffer filled with one value."""
    buffer = b.scratch(size, vectors.dtype)
    vectors.each(size, lambda o, n: vectors.store(buffer, o, vectors.splat(value), n))
    return buffer


@contextmanager
def _loops(extents: Sequence[int]) -> Iterator[list[tirx.PrimExpr]]:
    with ExitStack() as stack:
        yield [stack.enter_context(b.serial(0, extent)) for extent in extents]
