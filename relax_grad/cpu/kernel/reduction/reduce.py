"""Sums over some axes: over rows, over columns, and over all axes except the channels.

Sums along a row are kept in several vectors, so that an addition does not wait for the previous
one. Sums down columns are kept in registers for a block of columns, or in the first-level cache for
whole rows, over a fixed number of stretches of rows; the partial sums are added at the end. The
order of additions does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, as_float, bind, sum_of
from ..language.halves import Tensor
from ..language.row_sums import Sums
from ..language.statements import Emit
from .sums_plan import ColumnSumsPlan, column_sums_plan


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

    def each_row(self, channel: tirx.PrimExpr, emit: Emit) -> None:
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

        def square(at: tirx.PrimExpr, number: Extent | None) -> list[tirx.PrimExpr]:
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

    def body(x: Tensor, result: tirx.Buffer) -> None:
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
    vectors, plan = Vectors(cpu.lanes), column_sums_plan((outer, rows, columns), cpu)

    def body(x: Tensor, result: tirx.Buffer) -> None:
        def term(_row: tirx.PrimExpr) -> Callable:
            return lambda at, number: [vectors.load(x, at, number)]

        count = as_float(rows) if mean else None
        emit_column_sums(plan, term, [result], divisor=count)

    return _function("sum_columns", shapes, body)


def emit_column_sums(
    plan: ColumnSumsPlan,
    term: Callable,
    results: Sequence[tirx.Buffer],
    divisor: tirx.PrimExpr | None = None,
) -> None:
    """Emit sums over the rows of ``[outer, rows, columns]``.

    Parameters
    ----------
    plan : ColumnSumsPlan
        The extents, and the blocks of the sums.
    term : Callable
        ``term(row)`` emits the values that a row's terms share, and returns a function of index and
        number, which returns the vectors to sum, one for each result.
    results : Sequence[tirx.Buffer]
        The buffers of the sums, ``[outer, columns]``.
    divisor : tirx.PrimExpr, optional
        The divisor of the sums.
    """
    partial = results
    if plan.stretches > 1:
        partial = [b.scratch(plan.outer * plan.stretches * plan.columns) for _ in results]
    _ColumnSums(plan, term, results, partial=partial, divisor=divisor).emit()


@dataclass(frozen=True)
class _ColumnSums:
    """A generator of sums over rows.

    Attributes
    ----------
    plan, term, results, divisor
        As for :func:`emit_column_sums`.
    partial : Sequence[tirx.Buffer]
        The sums of each stretch of rows: the results if there is one.
    """

    plan: ColumnSumsPlan
    term: Callable
    results: Sequence[tirx.Buffer]
    partial: Sequence[tirx.Buffer]
    divisor: tirx.PrimExpr | None

    @property
    def _vectors(self) -> Vectors:
        return Vectors(self.plan.lanes)

    def emit(self) -> None:
        """Emit the tasks, and the sums of their partial sums."""
        with b.parallel(0, self.plan.tasks) as task:
            self._task(task)
        if self.plan.stretches > 1:
            with b.parallel(0, self.plan.outer) as n:
                self._add_stretches(n)

    def _task(self, task: tirx.PrimExpr) -> None:
        plan, stretches, blocks = self.plan, self.plan.stretches, self.plan.blocks
        part, j = bind(task // blocks), bind(task % blocks)
        n, stretch = bind(part // stretches), bind(part % stretches)
        first = bind(stretch * plan.rows // stretches)
        last = bind((stretch + 1) * plan.rows // stretches)
        base, offset = bind(n * plan.rows), bind(j * plan.width)
        target = bind(part * plan.columns)

        def sums(number_of: int, rest: int | None) -> None:
            self._sums((first, last, base), (offset, target), number_of, rest)

        def whole() -> None:
            sums(plan.vectors, None)

        def tail() -> None:
            sums(b.ceil_div(plan.last, plan.lanes), plan.last % plan.lanes or None)

        if plan.last == plan.width:
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

        def row_at(i: tirx.PrimExpr) -> tuple[Callable, tirx.PrimExpr]:
            """Return the terms of the i-th row, and the index of its first element."""
            row = bind(base + first + i)
            return self.term(row), bind(row * self.plan.columns + offset)

        def finish(at: Extent, number: Extent | None, sums: Sequence) -> None:
            for total, buffer in zip(sums, self.partial, strict=True):
                value = self._finished(total) if self.plan.stretches == 1 else total
                vectors.store(buffer, target + offset + at, value, number)

        size = bind(last - first)
        if self.plan.in_registers:
            self._sums_in_registers(size, row_at, finish, [None] * (number_of - 1) + [rest])
        else:
            width = number_of * vectors.lanes
            width = width if rest is None else width - vectors.lanes + rest
            self._sums_in_cache(size, row_at, finish, width)

    def _sums_in_registers(
        self, size: tirx.PrimExpr, row_at: Callable, finish: Callable, numbers: Sequence[int | None]
    ) -> None:
        """Emit the sums of vectors of so many lanes (None: all), which are unrolled."""
        vectors = self._vectors
        totals = [Accumulators(vectors, len(numbers)) for _ in self.results]
        for total in totals:
            for v in range(len(numbers)):
                total[v] = vectors.splat(0)
        with b.serial(0, size) as i:
            value, start = row_at(i)
            for v, number in enumerate(numbers):
                terms = value(start + v * vectors.lanes, number)
                for total, term in zip(totals, terms, strict=True):
                    total[v] = total[v] + term
        for v, number in enumerate(numbers):
            finish(v * vectors.lanes, number, [total[v] for total in totals])

    def _sums_in_cache(
        self, size: tirx.PrimExpr, row_at: Callable, finish: Callable, width: int
    ) -> None:
        """Emit the sums of so many columns."""
        vectors, together = self._vectors, self.plan.rows_at_once
        padded = b.ceil_div(width, vectors.lanes) * vectors.lanes
        totals = [b.scratch(padded) for _ in self.results]
        for total in totals:
            b.clear(total, b.const(0), padded)

        def sums_at(offset: tirx.PrimExpr) -> list:
            return [vectors.load(total, offset) for total in totals]

        def add(rows: Sequence[tuple[Callable, tirx.PrimExpr]]) -> None:
            def at_offset(offset: tirx.PrimExpr, number: Extent | None) -> None:
                sums = sums_at(offset)
                for value, start in rows:
                    terms = value(start + offset, number)
                    sums = [total + term for total, term in zip(sums, terms, strict=True)]
                for total, value in zip(totals, sums, strict=True):
                    vectors.store(total, offset, value)

            vectors.each(width, at_offset)

        done = bind(size // together * together)
        with b.serial(0, size // together) as i:
            add([row_at(i * together + j) for j in range(together)])
        if together > 1:
            with b.serial(0, size - done) as i:
                add([row_at(done + i)])
        vectors.each(width, lambda at, number: finish(at, number, sums_at(at)))

    def _add_stretches(self, n: tirx.PrimExpr) -> None:
        """Emit the sums of the partial sums of all stretches."""
        vectors, stretches, columns = self._vectors, self.plan.stretches, self.plan.columns

        def add(offset: tirx.PrimExpr, number: Extent | None) -> None:
            for buffer, result in zip(self.partial, self.results, strict=True):
                parts = [
                    vectors.load(buffer, (n * stretches + i) * columns + offset, number)
                    for i in range(stretches)
                ]
                total = self._finished(sum_of(parts))
                vectors.store(result, n * columns + offset, total, number)

        vectors.each(columns, add)

    def _finished(self, total: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return a sum, divided by the divisor if there is one."""
        return total if self.divisor is None else total / self._vectors.splat(self.divisor)


def _function(name: str, shapes: Sequence, body: Callable) -> tirx.PrimFunc:
    return b.prim_func(name, b.floats(("x", "result"), shapes), body)
