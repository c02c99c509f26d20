"""Sums over some axes: over rows, over columns, and over all but the channels.

Sums along a row are kept in several vectors, so that no addition waits for the one before it. Sums down columns
are kept in registers for a block of columns, over a fixed number of stretches of rows, whose sums are added at
the end: what is added in which order does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..target import CPU
from . import _builder as b
from ._builder import Accumulators, Extent, Sums, Vectors, as_float, bind, sum_of

#: Stretches that rows are summed in, where there are enough of them.
_STRETCHES = 8

#: Rows of a stretch, at least.
_STRETCH = 32

#: Vectors of a block of columns.
_BLOCK = 8


@dataclass(frozen=True)
class Channels:
    """A tensor of channels, ``[outer, channels, inner]``; extents may be symbolic (int32).

    Attributes
    ----------
    outer, channels, inner : int or tirx.PrimExpr
        The extents. A row is what lies along ``inner``.
    """

    outer: Extent
    channels: Extent
    inner: Extent

    def each_row(self, channel, emit: Callable) -> None:
        """Emit the loop over the rows of a channel: ``emit(base)`` for where each begins."""
        with b.serial(0, self.outer) as n:
            emit(bind((n * self.channels + channel) * self.inner))

    def sums(self, vectors: Vectors, channel, size: int, terms: Callable) -> list:
        """Return sums over a channel; ``terms(index, number)`` gives a vector for each."""
        sums = Sums(vectors, size)
        self.each_row(
            channel,
            lambda base: sums.add_row(self.inner, lambda o, number: terms(base + o, number)),
        )
        return [bind(total) for total in sums.totals()]

    def moments(self, vectors: Vectors, x: tirx.Buffer, channel) -> tuple:
        """Return mean and biased variance of a channel."""
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
    """Return the sum of ``[outer, channels, inner]`` over all but the channels.

    Parameters
    ----------
    of : Channels
        What is summed.
    shapes : Sequence
        The shapes of x and of the result.
    cpu : CPU
        What the function is for.
    mean : bool
        Whether the sums are divided by the number of what is summed.

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
    """Return the sum of ``[outer, rows, columns]`` over the rows.

    Parameters
    ----------
    outer, rows, columns : int or tirx.PrimExpr
        The extents, of which that of the columns is not symbolic.
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
        What is computed in.
    cpu : CPU
        What the function is for.
    extents : tuple
        The extents, of which that of the columns is not symbolic.
    term : Callable
        Emits what a row has in common and returns ``term(index, number)``, which gives the vectors that are
        summed, one for each result.
    results : Sequence[tirx.Buffer]
        What the sums are stored to, ``[outer, columns]``.
    divisor : tirx.PrimExpr, optional
        What the sums are divided by.
    """
    outer, rows, columns = extents
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
    width = block * vectors.lanes
    blocks = b.ceil_div(columns, width)
    partial = results
    if stretches > 1:
        partial = [b.scratch(outer * stretches * columns) for _ in results]

    def finish(total):
        return total if divisor is None else total / vectors.splat(divisor)

    def sums(first, last, base, offset, target, number_of, rest) -> None:
        """Emit the sums of some vectors of columns; of the last one, ``rest`` lanes."""
        totals = [Accumulators(vectors, number_of) for _ in results]
        for total in totals:
            for v in range(number_of):
                total[v] = vectors.splat(0)
        with b.serial(0, last - first) as i:
            row = bind(first + i)
            value, start = term(base + row), bind((base + row) * columns + offset)
            for v in range(number_of):
                number = rest if v == number_of - 1 else None
                for total, each in zip(
                    totals, value(start + v * vectors.lanes, number), strict=True
                ):
                    total[v] = total[v] + each
        for v in range(number_of):
            number = rest if v == number_of - 1 else None
            for total, buffer in zip(totals, partial, strict=True):
                value = finish(total[v]) if stretches == 1 else total[v]
                vectors.store(buffer, target + offset + v * vectors.lanes, value, number)

    with b.parallel(0, outer * (stretches * blocks)) as task:
        part, j = bind(task // blocks), bind(task % blocks)
        n, stretch = bind(part // stretches), bind(part % stretches)
        first = bind(stretch * rows // stretches)
        last = bind((stretch + 1) * rows // stretches)
        base, offset, target = bind(n * rows), bind(j * width), bind(part * columns)
        left = columns - (blocks - 1) * width

        def whole() -> None:
            sums(first, last, base, offset, target, block, None)

        def tail() -> None:
            number = b.ceil_div(left, vectors.lanes)
            sums(first, last, base, offset, target, number, left % vectors.lanes or None)

        if left == width:
            whole()
        elif blocks == 1:
            tail()
        else:
            b.either(j < blocks - 1, whole, tail)
    if stretches == 1:
        return
    with b.parallel(0, outer) as n:

        def add(offset, number) -> None:
            for buffer, result in zip(partial, results, strict=True):
                parts = [
                    vectors.load(buffer, (n * stretches + i) * columns + offset, number)
                    for i in range(stretches)
                ]
                vectors.store(result, n * columns + offset, finish(sum_of(parts)), number)

        vectors.each(columns, add)


def _tasks(parts: int, columns: int, block: int, vectors: Vectors) -> int:
    return parts * b.ceil_div(columns, block * vectors.lanes)


def _function(name: str, shapes: Sequence, body: Callable) -> tirx.PrimFunc:
    return b.prim_func(name, b.floats(("x", "result"), shapes), body)
