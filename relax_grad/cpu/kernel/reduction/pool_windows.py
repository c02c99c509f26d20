"""Common parts of the pooling kernels: the geometry of windows, padded copies of planes, and sums
over windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from math import prod

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, ceil_div, const
from ..language.extents import LINE
from ..language.halves import Tensor
from ..language.streams import are_large, fence, stream, streams

#: Tasks for each core; each task fills in the padding once.
_TASKS = 16

#: The bytes of the copied rows of a band, so that the band stays in the first-level cache with its
#: source rows and the rows of the result.
_BAND_BYTES = 12 * 1024

#: The largest share of the copied rows of a band that the next band copies again.
_MOST_AGAIN = 1 / 4

#: The mask of a float32's magnitude bits, and the bits of infinity, the smallest ones of a number
#: that is not finite.
_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000


@dataclass(frozen=True)
class Windows:
    """The windows along an axis: tap ``t`` of window ``o`` is at
    ``o * stride + t * dilation - before``.

    Attributes
    ----------
    extent, size, stride, before, number : int
        The elements of the axis, the taps of a window, the distance of windows, the padding before
        the data, and the number of windows.
    after : int
        The padding after the data, which matters if an average includes the padding.
    dilation : int
        The distance of taps.
    """

    extent: int
    size: int
    stride: int
    before: int
    number: int
    after: int = 0
    dilation: int = 1

    @property
    def length(self) -> int:
        """The number of elements from the first tap of the first window to the last tap of the last
        window."""
        return (self.number - 1) * self.stride + self.reach + 1

    @property
    def reach(self) -> int:
        """The distance of the last tap of a window from its first."""
        return (self.size - 1) * self.dilation

    @property
    def copied(self) -> int:
        """The number of elements of the axis before the end of the last window."""
        return max(0, min(self.extent, self.length - self.before))

    def has_elements(self) -> bool:
        """Tell whether every window has an element that is not padding."""
        starts = [o * self.stride - self.before for o in range(self.number)]
        taps = range(0, self.reach + 1, self.dilation)
        return all(any(0 <= start + tap < self.extent for tap in taps) for start in starts)

    def first_tap(self, window: tirx.PrimExpr, splat: Callable = const) -> tirx.PrimExpr:
        """Return the first tap of a window that is not in the padding before the data."""
        missing = tirx.max(splat(0), splat(self.before) - window * splat(self.stride))
        if self.dilation == 1:
            return missing
        return tirx.truncdiv(missing + splat(self.dilation - 1), splat(self.dilation))

    def taps(self, phase: int) -> list[tuple[int, int]]:
        """Return the taps that read elements ``i * stride + phase``, each with its window relative
        to i."""
        at = phase + self.before
        distances = ((t, at - t * self.dilation) for t in range(self.size))
        return [(t, far // self.stride) for t, far in distances if far % self.stride == 0]

    def margins(self, steps: int) -> tuple[int, int]:
        """Return the numbers of absent windows before the first and after the last that ``steps``
        strides refer to."""
        offsets = self._offsets()
        return -min(offsets), max(0, steps - 1 + max(offsets) - (self.number - 1))

    @property
    def ahead(self) -> int:
        """The distance of the last window that has an element of a stride from the window with the
        number of the stride."""
        return max(self._offsets())

    def _offsets(self) -> list[int]:
        return [0, *(o for phase in range(self.stride) for _, o in self.taps(phase))]


@dataclass(frozen=True)
class Pool:
    """A pooling of planes, or of volumes.

    Attributes
    ----------
    planes : int or tirx.PrimExpr
        The number of planes.
    outer : tuple[Windows, ...]
        The windows along all axes except the last: one axis of a plane, two axes of a volume.
    columns : Windows
        The windows along the last axis.
    """

    planes: Extent
    outer: tuple[Windows, ...]
    columns: Windows

    @property
    def extents(self) -> list[int]:
        return [axis.extent for axis in (*self.outer, self.columns)]

    @property
    def numbers(self) -> list[int]:
        return [axis.number for axis in (*self.outer, self.columns)]

    @property
    def is_dilated(self) -> bool:
        return any(axis.dilation > 1 for axis in (*self.outer, self.columns))

    def outer_taps(self) -> Iterator[tuple[int, ...]]:
        """Yield the taps of a window along all axes except the last."""
        return product(*(range(axis.size) for axis in self.outer))

    def tap(self, outer: Sequence[int], column: int) -> int:
        """Return the index of a tap, in row-major order."""
        return _flat([*outer, column], [axis.size for axis in (*self.outer, self.columns)])

    def row(self, plane: tirx.PrimExpr, at: Sequence) -> tirx.PrimExpr:
        """Return the index of the first element of a row."""
        return bind(_flat([plane, *at, const(0)], [0, *self.extents]))

    def windows(self, plane: tirx.PrimExpr, at: Sequence) -> tirx.PrimExpr:
        """Return the index of the first window of a row."""
        return bind(_flat([plane, *at, const(0)], [0, *self.numbers]))

    @contextmanager
    def each_plane(self, cpu: CPU, streamed: bool | tirx.PrimExpr = False) -> Iterator[Callable]:
        """Emit the loop over tasks, and yield a function that emits the loop over the planes of a
        task.

        The tasks may store past the caches unless ``streamed`` is false.
        """
        may_stream = streamed is not False
        tasks = _TASKS * cpu.cores
        if isinstance(self.planes, int):
            tasks = min(tasks, self.planes)
        with streams(cpu.lanes) if may_stream else nullcontext(), b.parallel(0, tasks) as task:
            first, last = bind(task * self.planes // tasks), bind((task + 1) * self.planes // tasks)
            yield lambda: b.serial(first, last)
            if may_stream:
                fence(cpu.lanes)

    def streams(self, tensors: Sequence[tirx.Buffer]) -> bool | tirx.PrimExpr:
        """Tell whether a gradient is stored past the caches: if it and the other tensors are too
        large for them, and its rows have whole lines; a condition if their sizes are symbolic."""
        return self.columns.extent % LINE == 0 and are_large(tensors)

    def band(self, lanes: int) -> int:
        """Return the number of windows of a band along the first axis: all, if their elements stay
        in the first-level cache, or bands would copy many elements again."""
        axis, columns = self.outer[0], self.columns
        width = ceil_div(columns.length, columns.stride * lanes) * columns.stride * lanes
        line = 4 * width * prod(other.length for other in self.outer[1:])
        lines = max(1, _BAND_BYTES // line)
        most = max(1, (lines - axis.reach - 1) // axis.stride + 1)
        again = max(0, axis.reach + 1 - axis.stride)
        if again > _MOST_AGAIN * most * axis.stride:
            return axis.number
        return ceil_div(axis.number, ceil_div(axis.number, most))

    @contextmanager
    def each_band(self, lanes: int) -> Iterator[Band]:
        """Emit the loop over bands of windows along the first axis, and yield the band."""
        number, size = self.outer[0].number, self.band(lanes)
        if size == number:
            yield Band(const(0), const(number), size, number)
            return
        with b.serial(0, ceil_div(number, size)) as i:
            first = bind(i * size)
            yield Band(first, bind(tirx.min(first + size, const(number))), size, number)

    @contextmanager
    def each_row_of_windows(self, band: Band) -> Iterator[Sequence[tirx.Var]]:
        """Emit the loops over the windows of a band along all axes except the last, and yield their
        indices."""
        with (
            b.serial(band.first, band.end) as first,
            _loops([axis.number for axis in self.outer[1:]]) as others,
        ):
            yield [first, *others]


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


class Source:
    """A padded band of a plane, ``[.., row][phase][column // stride]``, with the phase
    ``column % stride``.

    Parameters
    ----------
    pool : Pool
        The geometry of the pooling.
    vectors : Vectors
        The vectors.
    padding : float
        The value of the padding.
    """

    def __init__(self, pool: Pool, vectors: Vectors, padding: float):
        self._pool, self._vectors, self._padding = pool, vectors, padding
        columns, lanes = pool.columns, vectors.lanes
        self._step = columns.stride * lanes
        copied = ceil_div(columns.extent, self._step) * lanes
        copied += ceil_div(columns.before, columns.stride)
        read = ceil_div(columns.number, lanes) * lanes + columns.reach // columns.stride
        # The vectors that are copied are aligned.
        copies = [divmod(columns.before + shift, columns.stride) for shift in range(columns.stride)]
        self._starts = {phase: -column % lanes for column, phase in copies}
        longest = max(copied, read) + max(self._starts.values())
        self._width = ceil_div(longest, lanes) * lanes
        first, *others = pool.outer
        self._first: tirx.PrimExpr = const(0)
        self._heights = [
            (pool.band(lanes) - 1) * first.stride + first.reach + 1,
            *(axis.length for axis in others),
        ]
        self._row = columns.stride * self._width
        self._buffer = filled(vectors, prod(self._heights) * self._row, padding)
        self._largest = Accumulators(Vectors(lanes, "int32"), 1)

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
            row = bind(_flat(place, self._heights) * self._row + j)
            for u in range(columns.size):
                column, phase = divmod(u * columns.dilation, columns.stride)
                yield bind(self._vectors.load(self._buffer, row + (self._phase(phase) + column)))

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
            target = bind(_flat(place, self._heights) * self._row)
            source = pool.row(plane, [i, *at])
            whole, rest = divmod(columns.extent, self._step)
            with b.serial(0, whole) as m:
                self._copy(x, source + m * self._step, target + m * lanes, self._step)
            if rest:
                self._copy(x, source + whole * self._step, target + whole * lanes, rest)

    def _pad(self, line: tirx.PrimExpr) -> None:
        """Fill a line of the band with padding."""
        size, vectors = prod(self._heights[1:]) * self._row, self._vectors
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
            vectors.store(self._buffer, target + (self._phase(phase) + column), part)

    def _phase(self, phase: int) -> int:
        """Return the index in a row of the first column of a phase."""
        return phase * self._width + self._starts[phase]


class Gathered:
    """Values of windows that elements gather, with a margin of absent windows around them.

    Parameters
    ----------
    pool, vectors
        As for :class:`Source`.
    streamed : bool or tirx.PrimExpr
        Whether the sums are stored past the caches.
    """

    def __init__(self, pool: Pool, vectors: Vectors, streamed: bool | tirx.PrimExpr):
        self._pool, self._vectors, self._streamed = pool, vectors, streamed
        self.integers = Vectors(vectors.lanes, "int32")
        columns, lanes = pool.columns, vectors.lanes
        margins = [axis.margins(ceil_div(axis.extent, axis.stride)) for axis in pool.outer]
        self._first = [first for first, _ in margins]
        self._heights = [
            first + axis.number + behind
            for (first, behind), axis in zip(margins, pool.outer, strict=True)
        ]
        steps = ceil_div(ceil_div(columns.extent, columns.stride), lanes) * lanes
        left, right = columns.margins(steps)
        inner = ceil_div(columns.number, lanes) * lanes
        # The vectors of windows are aligned.
        self._left = ceil_div(left, lanes) * lanes
        longest = self._left + max(inner, columns.number + right)
        self._width = ceil_div(longest, lanes) * lanes

    def buffer(self, vectors: Vectors, value: float) -> tirx.Buffer:
        """Allocate one element for each window; elements of absent windows hold ``value``."""
        return filled(vectors, prod(self._heights) * self._width, value)

    def at(self, at: Sequence, j: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the index of a window."""
        place = [i + first for i, first in zip(at, self._first, strict=True)]
        return _flat(place, self._heights) * self._width + self._left + j

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
        step = columns.stride * lanes
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


def _flat(at: Sequence, extents: Sequence[int]) -> Extent:
    """Return the index of an element, in row-major order."""
    index = at[0]
    for i, extent in zip(at[1:], extents[1:], strict=True):
        index = index * extent + i
    return index
