"""Readers of the first factor of a matrix product: in place, or from a copy of a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tvm import tirx

from ..language import builder as b
from ..language.builder import Vectors, as_expr, bind, ceil_div, const
from ..language.extents import LINE, Extent
from ..language.halves import Tensor
from .product import Matmul

#: Strips of a transposed A that are packed together, so that its rows are read in whole cache
#: lines.
_STRIPS = 8


@dataclass(frozen=True)
class Factor:
    """A reader of A in place, ``[m, k]``.

    Attributes
    ----------
    p : Matmul
        The products.
    vectors : Vectors
        The vectors.
    size : tuple[int, int]
        The rows of a strip, and the strips of a task.
    depth : int
        The most steps of k of a stretch.
    ahead : int
        The steps of k that rows of a transposed A are prefetched before they are copied; 0 for
        none.
    """

    p: Matmul
    vectors: Vectors
    size: tuple[int, int]
    depth: int = field(kw_only=True)
    ahead: int = field(default=0, kw_only=True)

    def place(self) -> tirx.Buffer | None:
        """Allocate the buffer for a task's copy of A, if there is one."""
        return None

    def reader(
        self, a: Tensor, a0: tirx.PrimExpr, place: tirx.Buffer | None, strips: tuple, depth: tuple
    ) -> Callable:
        """Emit the copies of some strips over a stretch of k, and return the reader of their
        elements.

        ``reader(row)(i, k)`` is the element of row ``row + i`` at step ``k`` of the stretch.
        """

        def read(row: tirx.PrimExpr) -> Callable:
            base = bind(a0 + row * self.p.depth + depth[0])
            return lambda i, k: a[base + k + i * self.p.depth]

        return read


class Copies(Factor):
    """A reader of a copy of A, ``[row][k]``, whose row stride is not a power of 2."""

    @property
    def _pitch(self) -> int:
        return self.depth + LINE

    def place(self) -> tirx.Buffer:
        return b.scratch(self.size[0] * self.size[1] * self._pitch)

    def reader(
        self, a: Tensor, a0: tirx.PrimExpr, place: tirx.Buffer, strips: tuple, depth: tuple
    ) -> Callable:
        (first, last), height = strips, self.size[0]
        top = bind(first * height)
        with b.serial(top, bind(tirx.min(last * height, as_expr(self.p.rows)))) as row:
            self.copy_row((a, a0, row), place, bind((row - top) * self._pitch), depth)

        def read(row: tirx.PrimExpr) -> Callable:
            base = bind((row - top) * self._pitch)
            return lambda i, k: place[base + k + i * self._pitch]

        return read

    def copy_row(
        self, source: tuple, place: tirx.Buffer, target: tirx.PrimExpr, depth: tuple
    ) -> None:
        """Emit the copy of a stretch of a row; ``source`` is A, its offset and the row."""
        (a, a0, row), (k0, size) = source, depth
        start = bind(a0 + row * self.p.depth + k0)
        self.vectors.each(
            size,
            lambda k, left: self.vectors.store(
                place, target + k, self.vectors.load(a, start + k, left), left
            ),
        )


class Across(Factor):
    """A reader of a transposed A in place, ``[k, m]``."""

    def reader(
        self, a: Tensor, a0: tirx.PrimExpr, place: tirx.Buffer | None, strips: tuple, depth: tuple
    ) -> Callable:
        def read(row: tirx.PrimExpr) -> Callable:
            base = bind(a0 + depth[0] * self.p.rows + row)
            return lambda i, k: a[base + k * self.p.rows + i]

        return read


class Strips(Factor):
    """A reader of a copy of a transposed A, ``[k, m]``, in the layout ``[strip][k][row]``.

    Rows are copied in whole vectors: masked stores are slow on processors without AVX-512. What a
    vector writes beyond a row is overwritten by the next one, and each strip ends with room for a
    vector. Strips of half a vector are copied in half vectors, which no cache line divides.
    """

    def place(self) -> tirx.Buffer:
        return b.scratch(self.size[1] * (self.size[0] * self.depth + self.vectors.lanes))

    def reader(
        self, a: Tensor, a0: tirx.PrimExpr, place: tirx.Buffer, strips: tuple, depth: tuple
    ) -> Callable:
        (first, last), (k0, size), height = strips, depth, self.size[0]
        vectors, rows = self.copied, self.p.rows
        lanes = vectors.lanes
        pitch = bind(size * height + self.vectors.lanes)
        offsets = range(0, height, lanes)

        def copy(begin: tirx.PrimExpr, number: tirx.PrimExpr, is_whole: bool) -> None:
            with b.serial(0, size) as k, b.serial(0, number) as i:
                row = bind((begin + i) * height)
                target = bind((begin + i - first) * pitch + k * height)
                if self.ahead:
                    b.prefetch(a, a0 + (k0 + k + self.ahead) * rows + row, level=1)
                for offset in offsets:
                    left = tirx.max(const(0), tirx.min(const(lanes), rows - row - offset))
                    number_of = None if is_whole else bind(left)
                    part = self.part(a, a0, k0 + k, row + offset, number_of)
                    vectors.store(place, target + offset, part)

        with b.serial(0, ceil_div(last - first, _STRIPS)) as group:
            begin = bind(first + group * _STRIPS)
            number = bind(tirx.min(const(_STRIPS), last - begin))
            end = (begin + number - 1) * height + (offsets[-1] + lanes)
            b.either(
                end <= rows,
                lambda: copy(begin, number, True),
                lambda: copy(begin, number, False),
            )

        return self.reader_of(place, first, pitch)

    def reader_of(self, place: tirx.Buffer, first: tirx.PrimExpr, pitch: tirx.PrimExpr) -> Callable:
        """Return the reader of a copy of strips from the first one on, at a distance."""
        height = self.size[0]

        def read(row: tirx.PrimExpr) -> Callable:
            strip, start = row // height - first, row % height
            base = bind(strip * pitch + start)
            return lambda i, k: place[base + k * height + i]

        return read

    @property
    def copied(self) -> Vectors:
        """The vectors of the copies."""
        lanes = self.vectors.lanes
        return Vectors(lanes // 2) if 2 * self.size[0] <= lanes else self.vectors

    def part(
        self,
        a: Tensor,
        a0: tirx.PrimExpr,
        k: tirx.PrimExpr,
        row: tirx.PrimExpr,
        number: Extent | None,
    ) -> tirx.PrimExpr:
        """Return a vector of a row of the transposed A; ``number`` lanes exist."""
        return self.copied.load(a, a0 + k * self.p.rows + row, number)


class TransposedStrips(Strips):
    """A reader of a copy of A, ``[m, k]``, in the layout ``[strip][k][row]``."""

    def reader(
        self, a: Tensor, a0: tirx.PrimExpr, place: tirx.Buffer, strips: tuple, depth: tuple
    ) -> Callable:
        (first, last), (k0, size), height = strips, depth, self.size[0]
        rows, steps = self.p.rows, self.p.depth
        pitch = bind(size * height + self.vectors.lanes)
        with b.serial(first, last) as i:
            row = bind(i * height)
            target = bind((i - first) * pitch)
            self.vectors.copy_transposed(
                (a, bind(a0 + row * steps + k0), steps),
                bind(tirx.min(const(height), rows - row)),
                size,
                place,
                lambda k: target + k * height,
                repeats=True,
                strides=(height,),
            )
        return self.reader_of(place, first, pitch)


#: The readers of A: in place as it is stored, or from a copy of its rows or of its strips.
READERS: dict[str, tuple[type[Factor], type[Factor]]] = {
    "in place": (Factor, Across),
    "copied": (Copies, Copies),
    "strips": (Strips, Strips),
    "transposed": (TransposedStrips, TransposedStrips),
}
