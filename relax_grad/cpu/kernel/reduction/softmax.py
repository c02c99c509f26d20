"""Softmax, its logarithm and their gradients, along rows or down columns.

A row, or a block of neighbouring columns, is read three times while it is in the cache: for its
maximum, for the sum of its exponentials, and for the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language import functions as math
from ..language.builder import Accumulators, Extent, Vectors, bind
from ..language.halves import Tensor
from ..language.row_sums import Sums
from ..language.statements import Emit
from .lines import Lines, LinesPlan, lines_plan

_LOWEST = float("-inf")


class Row:
    """A line whose elements are contiguous.

    Attributes
    ----------
    number : tirx.PrimExpr
        The index of the line.
    base : tirx.PrimExpr
        The offset of its first element.
    """

    def __init__(self, vectors: Vectors, extent: Extent, number: tirx.PrimExpr):
        self._vectors, self._extent = vectors, extent
        self.number, self.base = number, bind(number * extent)

    def fold(
        self, term: Callable, start: float = 0.0, combine: Callable = lambda a, b: a + b
    ) -> list[tirx.PrimExpr]:
        """Return the reduction of ``term(index, number, k)`` along the lines, as a list of vectors
        (here one).

        Each lane of the k-th vector holds the result of its line; for a row, all lanes hold the
        same.
        """
        vectors = self._vectors
        sums = Sums(vectors, start=start, combine=combine)

        def terms(offset: tirx.PrimExpr, number: Extent | None) -> list[tirx.PrimExpr]:
            return [vectors.only(term(self.base + offset, number, 0), number, start)]

        sums.add_row(self._extent, terms)
        return [bind(vectors.splat(sums.totals()[0]))]

    def each(self, emit: Emit) -> None:
        """Emit ``emit(index, number, k)`` for each vector of the line; k is 0."""
        self._vectors.each(self._extent, lambda o, number: emit(self.base + o, number, 0))


class Columns:
    """A block of neighbouring columns: several vectors, or a part of one.

    Attributes
    ----------
    first : tirx.PrimExpr
        The index of the first line.
    size : int
        The number of vectors.
    number : int or tirx.PrimExpr or None
        The number of lanes of a partial vector; None for whole vectors.
    """

    def __init__(
        self,
        vectors: Vectors,
        of: Lines,
        n: tirx.PrimExpr,
        start: tirx.PrimExpr,
        size: int,
        number: Extent | None = None,
    ):
        self._vectors, self._of, self.size, self.number = vectors, of, size, number
        self.first = bind(n * of.inner + start)
        self._base = bind(n * of.extent * of.inner + start)

    def fold(
        self, term: Callable, start: float = 0.0, combine: Callable = lambda a, b: a + b
    ) -> list[tirx.PrimExpr]:
        total = Accumulators(self._vectors, self.size)
        for k in range(self.size):
            total[k] = self._vectors.splat(start)

        def add(at: tirx.PrimExpr, number: Extent | None, k: int, _row: tirx.PrimExpr) -> None:
            total[k] = combine(total[k], term(at, number, k))

        self.each_row(add)
        return [bind(total[k]) for k in range(self.size)]

    def each(self, emit: Emit) -> None:
        self.each_row(lambda at, number, k, _row: emit(at, number, k))

    def each_row(self, emit: Emit) -> None:
        """Emit ``emit(index, number, k, row)`` for the k-th vector of each row of the lines."""
        with b.serial(0, self._of.extent) as i:
            base = bind(self._base + i * self._of.inner)
            for k in range(self.size):
                emit(base + k * self._vectors.lanes, self.number, k, i)


def each_line(plan: LinesPlan, emit: Callable[[Row | Columns], None]) -> None:
    """Emit ``emit`` for each row, or for each block of neighbouring columns."""
    of, vectors, width = plan.of, Vectors(plan.lanes), plan.width
    if of.are_rows:
        with b.parallel(0, of.outer) as row:
            emit(Row(vectors, of.extent, row))
        return
    with b.parallel(0, of.outer * plan.blocks) as task:
        n, start = bind(task // plan.blocks), bind(task % plan.blocks * width)

        def whole() -> None:
            emit(Columns(vectors, of, n, start, plan.vectors))

        def rest() -> None:
            def one(offset: tirx.PrimExpr, number: Extent | None) -> None:
                emit(Columns(vectors, of, n, start=start + offset, size=1, number=number))

            vectors.each(of.inner - start if plan.last is None else plan.last, one)

        if plan.last == 0:
            whole()
        elif not plan.has_whole_blocks:
            rest()
        else:
            b.either(start + width <= of.inner, whole, rest)


def softmax(lines: Lines, shape: Sequence[Extent], cpu: CPU) -> tirx.PrimFunc:
    """Return the kernel of softmax.

    Parameters
    ----------
    lines : Lines
        The lines to normalize.
    shape : Sequence
        The shape of x and of the result.
    cpu : CPU
        The target CPU.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and y.
    """
    vectors = Vectors(cpu.lanes)

    def line(of: Row | Columns, x: Tensor, y: Tensor) -> None:
        largest = _largest(vectors, of, x)

        def exponential(at: tirx.PrimExpr, number: Extent | None, k: int) -> tirx.PrimExpr:
            value = math.exp(bind(vectors.load(x, at, number) - largest[k]))
            vectors.store(y, at, value, number)
            return value

        factors = [bind(vectors.splat(1) / total) for total in of.fold(exponential)]

        def scale(at: tirx.PrimExpr, number: Extent | None, k: int) -> None:
            vectors.store(y, at, vectors.load(y, at, number) * factors[k], number)

        of.each(scale)

    return _function("softmax", ("x", "y"), lines_plan(lines, cpu), shape, line)


def log_softmax(lines: Lines, shape: Sequence[Extent], cpu: CPU) -> tirx.PrimFunc:
    """Return the kernel of the logarithm of softmax; parameters as for :func:`softmax`."""
    vectors = Vectors(cpu.lanes)

    def line(of: Row | Columns, x: Tensor, y: Tensor) -> None:
        largest = _largest(vectors, of, x)

        def exponential(at: tirx.PrimExpr, number: Extent | None, k: int) -> tirx.PrimExpr:
            return math.exp(bind(vectors.load(x, at, number) - largest[k]))

        shifts = [math.log_of_normal(total) for total in of.fold(exponential)]

        def shift(at: tirx.PrimExpr, number: Extent | None, k: int) -> None:
            value = vectors.load(x, at, number) - largest[k] - shifts[k]
            vectors.store(y, at, value, number)

        of.each(shift)

    return _function("log_softmax", ("x", "y"), lines_plan(lines, cpu), shape, line)


def softmax_backward(lines: Lines, shape: Sequence[Extent], cpu: CPU) -> tirx.PrimFunc:
    """Return the kernel of the gradient of softmax.

    Parameters
    ----------
    lines, shape, cpu
        As for :func:`softmax`.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, y, and dx, which it sets to ``(dy - sum(dy * y)) * y``.
    """
    vectors = Vectors(cpu.lanes)

    def line(of: Row | Columns, dy: Tensor, y: Tensor, dx: Tensor) -> None:
        totals = of.fold(
            lambda at, number, _: vectors.load(dy, at, number) * vectors.load(y, at, number)
        )

        def element(at: tirx.PrimExpr, number: Extent | None, k: int) -> None:
            grad = vectors.load(dy, at, number) - totals[k]
            vectors.store(dx, at, grad * vectors.load(y, at, number), number)

        of.each(element)

    return _function("softmax_backward", ("dy", "y", "dx"), lines_plan(lines, cpu), shape, line)


def log_softmax_backward(lines: Lines, shape: Sequence[Extent], cpu: CPU) -> tirx.PrimFunc:
    """Return the kernel of the gradient of the logarithm of softmax.

    Parameters
    ----------
    lines, shape, cpu
        As for :func:`softmax`.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, y, and dx, which it sets to ``dy - sum(dy) * exp(y)``.
    """
    vectors = Vectors(cpu.lanes)

    def line(of: Row | Columns, dy: Tensor, y: Tensor, dx: Tensor) -> None:
        totals = of.fold(lambda at, number, _: vectors.load(dy, at, number))

        def element(at: tirx.PrimExpr, number: Extent | None, k: int) -> None:
            share = totals[k] * math.exp(bind(vectors.load(y, at, number)))
            vectors.store(dx, at, vectors.load(dy, at, number) - share, number)

        of.each(element)

    return _function("log_softmax_backward", ("dy", "y", "dx"), lines_plan(lines, cpu), shape, line)


def _largest(vectors: Vectors, of: Row | Columns, x: tirx.Buffer) -> list:
    """Return the maxima of the lines, as vectors."""
    return of.fold(lambda at, number, _: vectors.load(x, at, number), _LOWEST, tirx.max)


def _function(
    name: str,
    names: Sequence[str],
    plan: LinesPlan,
    shape: Sequence[Extent],
    line: Callable,
) -> tirx.PrimFunc:
    """Return a function of tensors of one shape; ``line(of, *buffers)`` emits its body for each
    line."""

    def body(*buffers: Tensor) -> None:
        each_line(plan, lambda of: line(of, *buffers))

    return b.prim_func(name, b.floats(names, [shape] * len(names)), body)
