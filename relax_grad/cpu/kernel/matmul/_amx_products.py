"""Matrix products of bfloat16 by tiles (AMX).

B is packed into panels of pairs as for ``vdpbf16ps``: 16 rows of a panel are a tile. A tile of A is
16 rows of 16 pairs: A is read in place, or each task copies its rows where k is transposed or no
multiple of a tile's 32 elements. The copies of both factors are padded with zeros to whole tiles
of k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, as_expr, bind, ceil_div, const
from ..language.halves import Tensor
from ._factor import Factor
from ._generator import Generator
from ._plans import PackedPlan
from .pairs import pairs_of_rows
from .panels import Packing
from .tile import Ahead
from .tiled import Tiled, TilePacking

#: The bytes of a pair and of an element.
_PAIR, _ELEMENT = 4, 2


class _InPlace(Factor):
    """A reader of A in place: ``reader(row)`` is the place of the tile that begins with a row, and
    the distance of rows in bytes."""

    p: Tiled

    def reader(
        self, a: Tensor, a0: tirx.PrimExpr, place: tirx.Buffer | None, strips: tuple, depth: tuple
    ) -> Callable:
        elements = self.p.elements
        return lambda row: (
            a,
            bind(a0 + row * elements + 2 * depth[0]),
            bind(as_expr(elements * _ELEMENT)),
        )


class _Copied(Factor):
    """A reader of a task's copy of A, ``[row][pair]``."""

    p: Tiled

    @property
    def _pitch(self) -> int:
        # Rows of a tile that are apart by a power of 2 would share sets of the cache.
        return self.depth + amx.STEPS

    def place(self) -> tirx.Buffer:
        return b.scratch(self.size[0] * self.size[1] * self._pitch)

    def reader(
        self, a: Tensor, a0: tirx.PrimExpr, place: tirx.Buffer | None, strips: tuple, depth: tuple
    ) -> Callable:
        (first, last), height, pitch = strips, self.size[0], self._pitch
        top = bind(first * height)
        stop = bind(tirx.min(last * height, as_expr(self.p.rows)))
        if self.p.transpose_a:
            self._copy_transposed((a, a0), place, (top, stop), depth)
        else:
            self._copy((a, a0), place, (top, stop), depth)
        return lambda row: (place, bind((row - top) * pitch), const(_PAIR * pitch))

    def _copy(self, source: tuple, place: tirx.Buffer, rows: tuple, depth: tuple) -> None:
        (a, a0), (top, stop), (k0, size) = source, rows, depth
        existing = self.p.existing(k0, size)
        with b.serial(top, stop) as row:
            start, to = bind(a0 + row * self.p.elements), bind((row - top) * self._pitch)

            def copy(
                k: tirx.PrimExpr,
                number: Extent | None,
                start: tirx.PrimExpr = start,
                to: tirx.PrimExpr = to,
            ) -> None:
                # A last vector has zeros beyond the row, to the end of its tile.
                self.vectors.store(place, to + k, self.p.along(a, start, k0 + k, number))

            self.vectors.each(existing, copy)

    def _copy_transposed(
        self, source: tuple, place: tirx.Buffer, rows: tuple, depth: tuple
    ) -> None:
        """Emit the copy of columns of A as rows of pairs: squares of pairs of 16 rows of k."""
        (a, a0), (top, stop), (k0, size) = source, rows, depth
        p, lanes, vectors = self.p, self.vectors.lanes, self.vectors
        is_whole = isinstance(p.rows, int) and p.rows % lanes == 0

        def copy(row: tirx.PrimExpr, to: tirx.PrimExpr, number: Extent | None) -> None:
            with b.serial(0, b.quotient(size, lanes)) as j:
                k = bind(j * lanes)
                square = [self._pair((a, a0 + row), k0 + k + at, number) for at in range(lanes)]
                for at, pairs in enumerate(vectors.transpose(square)):
                    vectors.store(place, to + at * self._pitch + k, pairs)

        with b.serial(0, bind(ceil_div(stop - top, lanes))) as i:
            row, to = bind(top + i * lanes), bind(i * (lanes * self._pitch))
            if is_whole:
                copy(row, to, None)
            else:
                left = bind(as_expr(p.rows) - row)
                b.either(left >= lanes, lambda: copy(row, to, None), lambda: copy(row, to, left))

    def _pair(self, source: tuple, k: tirx.PrimExpr, number: Extent | None) -> tirx.PrimExpr:
        """Return a pair of rows of a transposed A; ``number`` elements of each exist."""
        (a, start), p = source, self.p
        if p.is_whole:
            return p.across(a, start, p.rows, k, number)
        whole, elements = as_expr(self.vectors.lanes if number is None else number), p.elements
        exists = [
            bind(tirx.Select(2 * k + odd < as_expr(elements), whole, const(0))) for odd in (0, 1)
        ]
        return pairs_of_rows((a, start, p.rows), k, (exists[0], exists[1]))


class TileGenerator(Generator):
    """A generator of products by tiles."""

    p: Tiled

    #: The sums of a tile, which each block of tiles allocates.
    _sums: tirx.Buffer

    def packing_of(self, plan: PackedPlan) -> Packing:
        return TilePacking(
            self.p, self.vectors, plan.vectors, stretch=plan.stretch, multiple=amx.STEPS
        )

    def factor(self, size: tuple[int, int]) -> Factor:
        reader = _InPlace if self.p.is_in_place else _Copied
        return reader(self.p, self.vectors, size, depth=self.packing.stretch)

    def _block(
        self,
        read: Callable,
        panels: tuple,
        c: Tensor | None,
        c0: tirx.PrimExpr,
        strips: tuple,
        columns: tuple,
        depth: tuple,
        among: tuple | None = None,
    ) -> None:
        self._sums = amx.scratch()
        with amx.tiles(self._rows):
            super()._block(
                read, panels, c, c0=c0, strips=strips, columns=columns, depth=depth, among=among
            )

    @property
    def _rows(self) -> int:
        """The rows of most tiles."""
        rows = self.p.rows
        return min(rows, self.tile_rows) if isinstance(rows, int) else self.tile_rows

    def _strip(self, i: tirx.PrimExpr, tile: Callable) -> None:
        rows, height = self.p.rows, self.tile_rows
        if isinstance(rows, int) and (rows % height == 0 or rows < height):
            tile(i * height, self._rows)
            return
        first = bind(i * height)
        number = bind(as_expr(rows) - first)

        def part() -> None:
            amx.begin(number)
            tile(first, number)
            amx.begin(self._rows)

        b.either(number >= height, lambda: tile(first, height), part)

    def spreads_in(self, rows: object, vectors: Sequence) -> bool:
        return False

    def spread(self, rows: object, vectors: Sequence, ahead: Sequence[Ahead]) -> Sequence[Ahead]:
        for prefetches in ahead:
            prefetches.all()
        return ()

    def _tile(
        self,
        reader: Callable,
        panel: tuple,
        c: Tensor,
        c0: tirx.PrimExpr,
        rows: tuple,
        columns: tuple,
        depth: tuple,
    ) -> None:
        (row, number), (j, numbers), (_, size, first, later) = rows, columns, depth
        lanes, width = self.vectors.lanes, self.width
        self.spread(number, numbers, later)
        row = bind(row)
        start = bind(c0 + row * self.p.columns + j * width)
        sums = self._sums
        amx.clear(sums, number)
        steps = b.quotient(size, amx.STEPS)
        at = (*panel, const(_PAIR * width))
        amx.add(sums, reader(row), at, steps=steps, rows=number, vectors=len(numbers))
        amx.store(sums, number)
        bias = None
        if self.bias is not None:
            bias = self.bias.vector_of(self.vectors, j * width, numbers)

        def finish(add: bool) -> None:
            terms = [None] * len(numbers)
            if bias is not None and not add:
                terms = [bind(bias(v)) for v in range(len(numbers))]
            with b.serial(0, number) as i:
                to = bind(start + i * self.p.columns)
                for v, exists in enumerate(numbers):
                    total = self.vectors.load(sums, i * amx.COLUMNS + v * lanes)
                    if add:
                        total = total + self.vectors.load(c, to + v * lanes, exists)
                    elif terms[v] is not None:
                        total = total + terms[v]
                    self.vectors.store(c, to + v * lanes, bind(total), exists)

        if isinstance(first, bool):
            finish(not first)
        else:
            b.either(first, lambda: finish(False), lambda: finish(True))
