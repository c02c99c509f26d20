"""Sums over some axes: over rows, over columns, and over all axes except the channels.

Sums along a row are kept in several vectors, so that an addition does not wait for the previous
one. Sums down columns are kept in registers for a block of columns, over a fixed number of
stretches of rows; the partial sums are added at the end. The order of additions does not depend on
the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..target import CPU
from . import builder as b
from ._sums import Sums
from .builder import Accumulators, Extent, Vectors, as_float, bind, sum_of

#: The number of stretches that rows are divided into, if there are enough rows.
_STRETCHES = 8

#: The minimum number of rows of a stretch.
_STRETCH = 32

#: The number of vectors in a block of columns.
_BLOCK = 8


@dataclass(frozen=True)
class Channels:
    """A tensor of channels, ``[outer, channels, inner]``; extents may be symbolic (int32).

    Attributes
    ----------
    outer, channels, inner : int or tirx.PrimExpr
        The extents. A row runs along ``inner``.
    """

    outer: Extent
    channels: Extent
    inner: Extent

    def each_row(self, channel: tirx.PrimExpr, emit: Callable) -> None:
        """Emit ``emit(base)`` for each row of a channel; ``base`` is the offset of the row."""
        with b.serial(0, self.outer) as n:
            emit(bind((n * self.channels + channel) * self.inner))

    def sums(self, vectors: Vectors, channel: tirx.PrimExpr, size: int, terms: Callable) -> list:
        """Return ``size`` sums over a channel; ``terms(index, number)`` returns a vector for
        each."""
        sums = Sums(vectors, size)
        self.each_row(
            channel,
            lambda base: sums.add_row(self.inner, lambda o, number: terms(base + o, number)),
        )
        return [bind(total) for total in sums.totals()]

    def moments(self, vectors: Vectors, x: tirx.Buffer, channel: tirx.PrimExpr) -> tuple:
        """Return the mean and the biased variance of a channel."""
        count = as_float(self.outer * self.inner)
        (total,) = self.sums(vectors, channel, 1, lambda at, number: [vectors.load(x, at, number)])
        mean = bind(total / count)
        wide = bind(vectors.splat(mean))

        def square(at, number):
            distance = bind(vectors.only(vectors.load(x, at, number) - wide, number))
            return [distance * distance]

        (total,) = self.sums(vectors, channel, 1, square)
        return mean, bind(total / count)


def sum_channels(
    of: Channels, shapes: Sequence[Sequence[Extent]], cpu: CPU, mean: bool = False
) -> tirx.PrimFunc:
    """Return the kernel of the sum of ``[outer, channels, inner]`` over all axes except the
    channels.

    Parameters
    ----------
    of : Channels
        The operand.
    shapes : Sequence
        The shapes of x and of the result.
    cpu : CPU
        The target CPU.
    mean : bool
        Whether the sums are divided by the number of terms.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and the result.
    """
    vectors = Vectors(cpu.lanes)

    def body(x, result) -> None:
        with b.parallel(0, of.channels) as c:
            (total,) = of.sums(vectors, c, 1, lambda at, number: [vectors.load(x, at, number)])
            b.store(result, c, total / as_float(of.outer * of.inner) if mean else total)

    return _function("sum_channels", shapes, body)


def sum_columns(
    outer: Extent,
    rows: Extent,
    columns: int,
    shapes: Sequence[Sequence[Extent]],
    cpu: CPU,
    mean: bool = False,
) -> tirx.PrimFunc:
    """Return the kernel of the sum of ``[outer, rows, columns]`` over the rows.

    Parameters
    ----------
    outer, rows, columns : int or tirx.PrimExpr
        The extents; ``columns`` is not symbolic.
    shapes, cpu, mean
        As for :func:`sum_channels`.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and the result, ``[outer, columns]``.
    """
    vectors = Vectors(cpu.lanes)

    def body(x, result) -> None:
        def term(_row):
            return lambda at, number: [vectors.load(x, at, number)]

        count = as_float(rows) if mean else None
        emit_column_sums(vectors, cpu, (outer, rows, columns), term, [result], count)

    return _function("sum_columns", shapes, body)


def emit_column_sums(
    vectors: Vectors,
    cpu: CPU,
    extents: tuple[Extent, Extent, int],
    term: Callable,
    results: Sequence[tirx.Buffer],
    divisor: tirx.PrimExpr | None = None,
) -> None:
    """Emit sums over the rows of ``[outer, rows, columns]``.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    cpu : CPU
        The target CPU.
    extents : tuple
        The extents; ``columns`` is not symbolic.
    term : Callable
        ``term(row)`` emits the values that a row's terms share, and returns a function of index and
        number, which returns the vectors to sum, one for each result.
    results : Sequence[tirx.Buffer]
        The buffers of the sums, ``[outer, columns]``.
    divisor : tirx.PrimExpr, optional
        The divisor of the sums.
    """
    _ColumnSums(vectors, cpu, extents, term, results, divisor).emit()


class _ColumnSums:
    """A generator of sums over rows, with its block sizes. Parameters are those of
    :func:`emit_column_sums`.

    Each task sums a stretch of rows for a block of columns.
    """

    def __init__(self, vectors: Vectors, cpu: CPU, extents, term, results, divisor):
        self._vectors, self._term, self._divisor = vectors, term, divisor
        self._outer, self._rows, self._columns = outer, rows, columns = extents
        stretches = _STRETCHES
        if isinstance(rows, int):
            stretches = max(1, min(stretches, rows // _STRETCH))
        if isinstance(outer, int) and outer >= 2 * cpu.cores:
            stretches = 1
        block = min(_BLOCK, b.ceil_div(columns, vectors.lanes))
        while (
            block > 1
            and isinstance(outer, int)
            and _tasks(outer * stretches, columns, block, vectors) < cpu.cores
        ):
            block = block // 2
        self._stretches, self._block, self._width = stretches, block, block * vectors.lanes
        self._blocks = b.ceil_div(columns, self._width)
        self._results = self._partial = results
        if stretches > 1:
            self._partial = [b.scratch(outer * stretches * columns) for _ in results]

    def emit(self) -> None:
        """Emit the tasks, and the sums of their partial sums."""
        with b.parallel(0, self._outer * (self._stretches * self._blocks)) as task:
            self._task(task)
        if self._stretches > 1:
            with b.parallel(0, self._outer) as n:
                self._add_stretches(n)

    def _task(self, task) -> None:
        stretches, blocks, vectors = self._stretches, self._blocks, self._vectors
        part, j = bind(task // blocks), bind(task % blocks)
        n, stretch = bind(part // stretches), bind(part % stretches)
        first = bind(stretch * self._rows // stretches)
        last = bind((stretch + 1) * self._rows // stretches)
        base, offset = bind(n * self._rows), bind(j * self._width)
        target = bind(part * self._columns)
        left = self._columns - (blocks - 1) * self._width

        def sums(number_of: int, rest: int | None) -> None:
            self._sums((first, last, base), (offset, target), number_of, rest)

        def whole() -> None:
            sums(self._block, None)

        def tail() -> None:
            sums(b.ceil_div(left, vectors.lanes), left % vectors.lanes or None)

        if left == self._width:
            whole()
        elif blocks == 1:
            tail()
        else:
            b.either(j < blocks - 1, whole, tail)

    def _sums(self, rows: tuple, columns: tuple, number_of: int, rest: int | None) -> None:
        """Emit the sums of ``number_of`` vectors of columns; the last one has ``rest`` lanes (None:
        all).

        ``rows`` is a tuple of the first row, the end of the rows, and the number of rows before row
        0 of this outer index; ``columns`` is a tuple of the first column, and the offset of the
        sums of all columns.
        """
        (first, last, base), (offset, target), vectors = rows, columns, self._vectors
        numbers = [None] * (number_of - 1) + [rest]
        totals = [Accumulators(vectors, number_of) for _ in self._results]
        for total in totals:
            for v in range(number_of):
                total[v] = vectors.splat(0)
        with b.serial(0, last - first) as i:
            row = bind(first + i)
            value, start = self._term(base + row), bind((base + row) * self._columns + offset)
            for v, number in enumerate(numbers):
                terms = value(start + v * vectors.lanes, number)
                for total, term in zip(totals, terms, strict=True):
                    total[v] = total[v] + term
        for v, number in enumerate(numbers):
            for total, buffer in zip(totals, self._partial, strict=True):
                value = self._finished(total[v]) if self._stretches == 1 else total[v]
                vectors.store(buffer, target + offset + v * vectors.lanes, value, number)

    def _add_stretches(self, n) -> None:
        """Emit the sums of the partial sums of all stretches."""
        vectors, stretches, columns = self._vectors, self._stretches, self._columns

        def add(offset, number) -> None:
            for buffer, result in zip(self._partial, self._results, strict=True):
                parts = [
                    vectors.load(buffer, (n * stretches + i) * columns + offset, number)
                    for i in range(stretches)
                ]
                total = self._finished(sum_of(parts))
                vectors.store(result, n * columns + offset, total, number)

        vectors.each(columns, add)

    def _finished(self, total):
        """Return a sum, divided by the divisor if there is one."""
        return total if self._divisor is None else total / self._vectors.splat(self._divisor)


def _tasks(parts: int, columns: int, block: int, vectors: Vectors) -> int:
    return parts * b.ceil_div(columns, block * vectors.lanes)


def _function(name: str, shapes: Sequence, body: Callable) -> tirx.PrimFunc:
    return b.prim_func(name, b.floats(("x", "result"), shapes), body)
