"""Pooling of planes and its gradients, without indices saved by the forward pass.

A plane is first copied to where its padding is filled in and columns that are a stride apart lie together: so
what a tap of consecutive windows reads is a vector. For the gradient of maximum pooling, the winner of each
window is found once and kept with the window's gradient; then every element gathers from the windows that it
belongs to those that it has won. Each element is written once, and nothing depends on the order of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Accumulators, Extent, Vectors, bind, ceil_div, const

_LOWEST = float("-inf")

#: Tasks for each core: what is padding, a task fills in once.
_TASKS = 16


@dataclass(frozen=True)
class Windows:
    """Where windows lie along an axis: tap ``t`` of window ``o`` is at element ``o * stride + t - before``.

    Attributes
    ----------
    extent, size, stride, before, number : int
        Elements of the axis, taps of a window, the distance of windows, padding, and how many windows.
    after : int
        Padding behind, which counts where an average includes the padding.
    """

    extent: int
    size: int
    stride: int
    before: int
    number: int
    after: int = 0

    def has_elements(self) -> bool:
        """Tell whether no window holds nothing but padding."""
        last = (self.number - 1) * self.stride - self.before
        return self.before < self.size and last < self.extent

    def taps(self, phase: int) -> list[tuple[int, int]]:
        """Return which taps elements ``i * stride + phase`` are, and of which window, counted from i."""
        at = phase + self.before
        return [
            (t, (at - t) // self.stride) for t in range(self.size) if (at - t) % self.stride == 0
        ]

    def margins(self, steps: int) -> tuple[int, int]:
        """Return how far before the first and behind the last window the taps of ``steps`` strides reach."""
        offsets = [0, *(o for phase in range(self.stride) for _, o in self.taps(phase))]
        return -min(offsets), max(0, steps - 1 + max(offsets) - (self.number - 1))


@dataclass(frozen=True)
class Pool:
    """A pooling of planes.

    Attributes
    ----------
    planes : int or tirx.PrimExpr
        How many planes.
    rows, columns : Windows
        The windows along both axes; the stride of columns is 1 or 2.
    """

    planes: Extent
    rows: Windows
    columns: Windows


def max_pool(pool: Pool, shapes: Sequence[Sequence[Extent]], cpu: CPU) -> tirx.PrimFunc:
    """Return maximum pooling.

    Parameters
    ----------
    pool : Pool
        What is pooled.
    shapes : Sequence
        The shapes of x and y.
    cpu : CPU
        What the function is for.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and y. A NaN is larger than any number.
    """
    vectors = Vectors(cpu.lanes)
    rows, columns = pool.rows, pool.columns

    def body(x, y) -> None:
        with _tasks(pool, cpu) as planes:
            source = _Source(pool, vectors)
            with b.serial(*planes) as plane:
                source.fill(x, plane)
                with b.serial(0, rows.number) as i:
                    base = bind((plane * rows.number + i) * columns.number)

                    def windows(j, number) -> None:
                        taps = list(source.taps(i, j))
                        result = Accumulators(vectors, 1)
                        result[0] = _largest(taps)
                        for tap in taps:
                            result[0] = tirx.Select(tirx.isnan(tap), tap, result[0])
                        vectors.store(y, base + j, result[0], number)

                    vectors.each(columns.number, windows)

    return _function("max_pool2d", ("x", "y"), shapes, body)


def max_pool_backward(pool: Pool, shapes: Sequence[Sequence[Extent]], cpu: CPU) -> tirx.PrimFunc:
    """Return the gradient of maximum pooling.

    Parameters
    ----------
    pool, cpu
        As for :func:`max_pool`.
    shapes : Sequence
        The shapes of dy, x and dx.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, x and dx. Of equal elements the first of a window wins, and of several NaNs the last.
    """
    vectors = Vectors(cpu.lanes)

    def body(dy, x, dx) -> None:
        with _tasks(pool, cpu) as planes:
            source, grads = _Source(pool, vectors), _Gathered(pool, vectors)
            winners = grads.buffer(grads.integers, -1)
            values = grads.buffer(vectors, 0)

            def share(at, tap: int):
                won = tirx.EQ(grads.integers.load(winners, at), grads.integers.splat(tap))
                return tirx.Select(won, vectors.load(values, at), vectors.splat(0))

            with b.serial(*planes) as plane:
                source.fill(x, plane)
                _find_winners(pool, vectors, source, grads, winners, values, dy, plane)
                grads.gather(dx, plane, share)

    return _function("max_pool2d_backward", ("dy", "x", "dx"), shapes, body)


def avg_pool_backward(
    pool: Pool,
    shapes: Sequence[Sequence[Extent]],
    cpu: CPU,
    include_pad: bool,
) -> tirx.PrimFunc:
    """Return the gradient of average pooling.

    Parameters
    ----------
    pool, cpu
        As for :func:`max_pool`.
    shapes : Sequence
        The shapes of dy and dx.
    include_pad : bool
        Whether the padding counts among what a window's sum is divided by.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy and dx.
    """
    vectors = Vectors(cpu.lanes)
    rows, columns = pool.rows, pool.columns

    def shares(grads: _Gathered, values, dy, plane) -> None:
        with b.serial(0, rows.number) as i:
            height = _count(rows, i, const, include_pad)
            base = bind((plane * rows.number + i) * columns.number)

            def share(j, number) -> None:
                at = tirx.Broadcast(j, vectors.lanes)
                at = at + tirx.Ramp(const(0), const(1), vectors.lanes)
                width = _count(columns, at, grads.integers.splat, include_pad)
                area = tirx.Cast(
                    f"float32x{vectors.lanes}", width * tirx.Broadcast(height, vectors.lanes)
                )
                value = vectors.load(dy, base + j, number) / area
                vectors.store(values, grads.at(i, j), vectors.only(value, number))

            vectors.each(columns.number, share)

    def body(dy, dx) -> None:
        with _tasks(pool, cpu) as planes:
            grads = _Gathered(pool, vectors)
            values = grads.buffer(vectors, 0)
            with b.serial(*planes) as plane:
                shares(grads, values, dy, plane)
                grads.gather(dx, plane, lambda at, _tap: vectors.load(values, at))

    return _function("avg_pool2d_backward", ("dy", "dx"), shapes, body)


def _count(windows: Windows, window, splat: Callable, include_pad: bool):
    """Return how many taps of a window count: those inside of the data, or of the padding as well."""
    start = window * splat(windows.stride) - splat(windows.before)
    first = start if include_pad else tirx.max(start, splat(0))
    end = windows.extent + (windows.after if include_pad else 0)
    last = tirx.min(start + splat(windows.size), splat(end))
    return tirx.max(last - first, splat(1))


def _find_winners(pool: Pool, vectors: Vectors, source, grads, winners, values, dy, plane) -> None:
    """Emit the search for the winner of each window, which is kept beside the window's gradient."""
    rows, columns, integers = pool.rows, pool.columns, grads.integers
    lanes = vectors.lanes
    with b.serial(0, rows.number) as i:
        base = bind((plane * rows.number + i) * columns.number)
        # Where nothing is above negative infinity, which padding is too, the first that is no padding wins.
        first_row = bind(tirx.max(const(0), rows.before - i * rows.stride) * columns.size)

        def windows(j, number) -> None:
            taps = list(source.taps(i, j))
            largest, winner = _largest(taps), Accumulators(integers, 1)
            winner[0] = integers.splat(0)
            # Nothing here waits for a comparison of the tap before.
            for t, tap in reversed(list(enumerate(taps))):
                winner[0] = tirx.Select(tirx.EQ(tap, largest), integers.splat(t), winner[0])
            before = tirx.Ramp(columns.before - j * columns.stride, const(-columns.stride), lanes)
            first = tirx.max(integers.splat(0), before) + tirx.Broadcast(first_row, lanes)
            winner[0] = tirx.max(winner[0], first)
            for t, tap in enumerate(taps):
                winner[0] = tirx.Select(tirx.isnan(tap), integers.splat(t), winner[0])
            at = bind(grads.at(i, j))
            integers.store(winners, at, integers.only(winner[0], number, -1))
            vectors.store(values, at, vectors.load(dy, base + j, number))

        vectors.each(columns.number, windows)


@contextmanager
def _tasks(pool: Pool, cpu: CPU):
    """Emit the loop over tasks, each of which has some planes, for which it yields the first and the end."""
    tasks = _TASKS * cpu.cores
    if isinstance(pool.planes, int):
        tasks = min(tasks, pool.planes)
    with b.parallel(0, tasks) as task:
        yield bind(task * pool.planes // tasks), bind((task + 1) * pool.planes // tasks)


def _largest(taps: Sequence):
    """Return the largest of some vectors, anything where there is a NaN, by pairs."""
    taps = list(taps)
    while len(taps) > 1:
        pairs = zip(taps[::2], taps[1::2], strict=False)
        taps = [bind(tirx.max(*pair)) for pair in pairs] + taps[len(taps) // 2 * 2 :]
    return taps[0]


class _Source:
    """A padded plane, ``[row][phase][column // stride]``, with the phase ``column % stride``."""

    def __init__(self, pool: Pool, vectors: Vectors):
        self._pool, self._vectors = pool, vectors
        rows, columns, lanes = pool.rows, pool.columns, vectors.lanes
        self._step = columns.stride * lanes
        copied = ceil_div(columns.extent, self._step) * lanes
        copied += ceil_div(columns.before, columns.stride)
        read = ceil_div(columns.number, lanes) * lanes + (columns.size - 1) // columns.stride
        self._width = max(copied, read)
        self._height = (rows.number - 1) * rows.stride + rows.size
        self._buffer = _filled(vectors, self._height * columns.stride * self._width, _LOWEST)

    def taps(self, i, j):
        """Yield the elements at each tap of the windows from (i, j) on, row by row."""
        rows, columns = self._pool.rows, self._pool.columns
        for t in range(rows.size):
            row = bind((i * rows.stride + t) * (columns.stride * self._width) + j)
            for u in range(columns.size):
                phase, column = u % columns.stride, u // columns.stride
                yield bind(self._vectors.load(self._buffer, row + phase * self._width + column))

    def fill(self, x: tirx.Buffer, plane) -> None:
        """Copy a plane."""
        rows, columns = self._pool.rows, self._pool.columns
        with b.serial(0, min(rows.extent, self._height - rows.before)) as r:
            target = bind((r + rows.before) * (columns.stride * self._width))
            source = bind((plane * rows.extent + r) * columns.extent)
            whole, rest = divmod(columns.extent, self._step)
            with b.serial(0, whole) as m:
                self._copy(x, source + m * self._step, target + m * self._vectors.lanes, self._step)
            if rest:
                at = whole * self._step, whole * self._vectors.lanes
                self._copy(x, source + at[0], target + at[1], rest)

    def _copy(self, x, source, target, number: int) -> None:
        """Copy columns to their phases."""
        vectors, columns, lanes = self._vectors, self._pool.columns, self._vectors.lanes
        parts = []
        for i in range(columns.stride):
            left = min(lanes, number - i * lanes)
            if left <= 0:
                parts.append(vectors.splat(_LOWEST))
            else:
                part = vectors.load(x, source + i * lanes, left)
                parts.append(bind(vectors.only(part, left, _LOWEST)))
        if columns.stride == 2:
            parts = vectors.evens_and_odds(*parts)
        for shift, part in enumerate(parts):
            phase, column = divmod(columns.before + shift, columns.stride)[::-1]
            vectors.store(self._buffer, target + phase * self._width + column, part)


class _Gathered:
    """What windows give to their elements, in a frame of windows that do not exist."""

    def __init__(self, pool: Pool, vectors: Vectors):
        self._pool, self._vectors = pool, vectors
        self.integers = Vectors(vectors.lanes, "int32")
        rows, columns, lanes = pool.rows, pool.columns, vectors.lanes
        self._steps = ceil_div(ceil_div(columns.extent, columns.stride), lanes) * lanes
        self._top, bottom = rows.margins(ceil_div(rows.extent, rows.stride))
        self._left, right = columns.margins(self._steps)
        self._inner = ceil_div(columns.number, lanes) * lanes
        self._height = self._top + rows.number + bottom
        self._width = self._left + max(self._inner, columns.number + right) + lanes

    def buffer(self, vectors: Vectors, value: float) -> tirx.Buffer:
        """Allocate something for each window, which for those that do not exist is a value."""
        return _filled(vectors, self._height * self._width, value)

    def at(self, i, j):
        """Return the index of a window."""
        return (i + self._top) * self._width + self._left + j

    def gather(self, dx: tirx.Buffer, plane, share: Callable) -> None:
        """Emit the sums of ``share(index, tap)`` over the windows that each element belongs to."""
        rows, columns, lanes = self._pool.rows, self._pool.columns, self._vectors.lanes
        with b.serial(0, ceil_div(rows.extent, rows.stride)) as i:
            for phase in range(rows.stride):
                r = bind(i * rows.stride + phase)
                base = bind((plane * rows.extent + r) * columns.extent)

                def row(base=base, phase=phase) -> None:
                    step = columns.stride * lanes
                    whole, rest = divmod(columns.extent, step)
                    with b.serial(0, whole) as m:
                        sums = self._sums(i, phase, bind(m * lanes), share)
                        self._store(dx, base + m * step, sums, step)
                    if rest:
                        sums = self._sums(i, phase, const(whole * lanes), share)
                        self._store(dx, base + whole * step, sums, rest)

                if phase < (rows.extent - 1) % rows.stride + 1:
                    row()
                else:
                    with b.when(r < rows.extent):
                        row()

    def _sums(self, i, phase: int, j, share: Callable) -> list:
        """Return a vector for each phase of the columns."""
        columns = self._pool.columns
        sums = []
        for column_phase in range(columns.stride):
            total = Accumulators(self._vectors, 1)
            total[0] = self._vectors.splat(0)
            for t, row in self._pool.rows.taps(phase):
                start = bind(self.at(i, j) + row * self._width)
                for u, column in columns.taps(column_phase):
                    total[0] = total[0] + share(start + column, t * columns.size + u)
            sums.append(total[0])
        return sums

    def _store(self, dx, start, sums: Sequence, number: int) -> None:
        vectors, lanes = self._vectors, self._vectors.lanes
        parts = sums if len(sums) == 1 else vectors.interleave(*sums)
        for k, part in enumerate(parts):
            left = min(lanes, number - k * lanes)
            if left > 0:
                vectors.store(dx, start + k * lanes, part, left)


def _filled(vectors: Vectors, size: int, value: float) -> tirx.Buffer:
    buffer = b.scratch(size, vectors.dtype)
    vectors.each(size, lambda o, n: vectors.store(buffer, o, vectors.splat(value), n))
    return buffer


def _function(name: str, names: Sequence[str], shapes: Sequence, body: Callable) -> tirx.PrimFunc:
    params = [(each, shape, "float32") for each, shape in zip(names, shapes, strict=True)]
    return b.prim_func(name, params, body)
