"""Sums and other reductions of rows, in several accumulators."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from tvm import tirx

from . import builder as b
from .builder import Accumulators, Extent, Vectors, bind, ceil_div, const
from .halves import Tensor

#: The sums of all parts up to which one thread adds them.
_FEW_SUMS = 32 * 1024


def add_parts(
    vectors: Vectors,
    sums: tirx.Buffer,
    target: Tensor,
    sizes: tuple[int, int],
    cores: int,
) -> None:
    """Emit the addition of parts of sums, in their order.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    sums : tirx.Buffer
        The sums of each part, one part after the other.
    target : tirx.Buffer or Half
        The result.
    sizes : tuple[int, int]
        The numbers of parts, and of sums of each.
    cores : int
        The number of threads.
    """
    parts, size = sizes

    def add(start: tirx.PrimExpr, number: Extent | None) -> None:
        total = Accumulators(vectors, 1)
        total[0] = vectors.load(sums, start, number)
        for part in range(1, parts):
            total[0] = total[0] + vectors.load(sums, part * size + start, number)
        vectors.store(target, start, total[0], number)

    with b.one_thread(parts * size <= _FEW_SUMS):
        each = ceil_div(ceil_div(size, cores), vectors.lanes) * vectors.lanes
        with b.parallel(0, ceil_div(size, each)) as i:
            start = bind(i * each)
            left = bind(tirx.min(const(each), size - start))
            vectors.each(left, lambda at, number: add(start + at, number))


class Sums:
    """Sums over the elements of rows, each in several accumulators, so that additions overlap.

    Parameters
    ----------
    vectors : Vectors
        The kind of vectors that rows are read in.
    size : int
        The number of sums.
    start : float
        The initial value of the sums.
    combine : Callable
        Another reduction instead of the sum, such as a maximum; it must be associative and
        commutative.
    """

    #: The number of accumulators of each sum, and the unrolling factor of the loop over a row.
    UNROLL = 4

    def __init__(
        self,
        vectors: Vectors,
        size: int = 1,
        start: float = 0.0,
        combine: Callable = lambda a, b: a + b,
    ):
        self._vectors, self._size, self._combine = vectors, size, combine
        self._all = Accumulators(vectors, size * self.UNROLL)
        for i in range(size * self.UNROLL):
            self._all[i] = vectors.splat(start)

    def add_row(self, extent: Extent, terms: Callable) -> None:
        """Emit the loop over a row: ``terms(offset, number)`` returns a vector for each sum.

        In the last vectors of a row, the lanes from ``number`` on must hold the identity of the
        reduction.
        """

        def add(offset: tirx.PrimExpr, number: Extent | None, i: int) -> None:
            for k, term in enumerate(terms(offset, number)):
                at = k * self.UNROLL + i
                self._all[at] = self._combine(self._all[at], term)

        self._vectors.each(extent, add, self.UNROLL)

    def totals(self) -> list:
        """Return the sums, as scalars."""
        totals = []
        for k in range(self._size):
            parts = [self._all[k * self.UNROLL + i] for i in range(self.UNROLL)]
            vector = self._vectors.fold(bind(reduce(self._combine, parts)), self._combine)
            totals.append(vector)
        return totals
