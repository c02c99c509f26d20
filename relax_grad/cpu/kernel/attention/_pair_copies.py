"""Copies of the rows of queries, keys and values as pairs of bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, as_expr, bind, ceil_div, const
from ..language.halves import Half, Tensor
from ..matmul.pairs import pairs_across, pairs_along, squares
from ._copies import Copies, Panels


class CopiesOfPairs(Copies):
    """Copies for products of pairs: of features, or of neighbouring rows."""

    def _clear_rows(self, target: Tensor, start: tirx.PrimExpr, rows: tuple, width: Extent) -> None:
        """Emit zeros in rows that are padding, from the first one to before the last one."""
        first, last = rows
        if self.plan.whole > 1:
            b.clear(target, bind(start + first * width), bind(as_expr((last - first) * width)))

    def pack_panels(
        self,
        source: tuple,
        extent: Extent,
        features: int,
        loop: Callable,
        scale: float | None = None,
    ) -> Panels:
        """Emit a copy of rows of features as panels, ``[panel][pair][row]``, padded with zeros."""
        vectors, lanes, width = self.vectors, self.vectors.lanes, self.plan.width
        buffer, start, step, *across = source
        pairs, depth = ceil_div(features, self.plan.step), self.plan.depth_of(features)
        is_whole = isinstance(extent, int) and extent % width == 0
        panels = b.scratch(ceil_div(extent, width) * (depth * width))
        if across:
            self._pack_columns(
                (buffer, start, *across), extent, features, loop=loop, scale=None, panels=panels
            )
            return Panels(panels, scale)
        with loop(0, ceil_div(extent, width)) as j, b.serial(0, self.plan.tile_vectors) as v:
            first = bind(j * width + v * lanes)
            left = None if is_whole else bind(extent - first)

            def row_of(
                row: int,
                k: tirx.PrimExpr,
                number: int,
                first: tirx.PrimExpr = first,
                left: tirx.PrimExpr = left,
            ) -> tirx.PrimExpr:
                exists = None if left is None else left > row
                place = buffer, bind(start + (first + row) * step)
                return pairs_along(place, k, features, number, exists)

            to = bind(j * (depth * width) + v * lanes)
            squares(vectors, pairs, row_of, target=panels, to=to, width=width)
            with b.when(tirx.EQ(v, const(0))):
                self._clear_rows(panels, j * (depth * width), (pairs, depth), width)
        return Panels(panels, scale)  # the products of bfloat16 would be less accurate with it

    def _pack_columns(
        self,
        source: tuple,
        extent: Extent,
        features: int,
        loop: Callable,
        scale: float | None,
        panels: tirx.Buffer,
    ) -> None:
        lanes, width = self.vectors.lanes, self.plan.width
        pairs, depth = ceil_div(features, self.plan.step), self.plan.depth_of(features)
        buffer, start, across = source
        with loop(0, ceil_div(extent, width)) as j:
            first = bind(j * width)
            parts = [
                ((buffer, bind(start + first + at), across), at, self._left(extent, first + at))
                for at in range(0, width, lanes)
            ]
            with b.serial(0, pairs) as k:
                to = bind((j * depth + k) * width)
                for rows, at, number in parts:
                    self.vectors.store(panels, to + at, pairs_across(rows, k, features, number))
            self._clear_rows(panels, j * (depth * width), (pairs, depth), width)

    def queries_of(self, source: tuple, rows: tirx.PrimExpr, features: int) -> tuple:
        return self._copied(source, rows, self.plan.rows, features, b.serial)

    def factors_of(
        self, source: tuple, extent: Extent, features: int, loop: Callable
    ) -> tuple[tuple, tuple]:
        along = self._copied(source, extent, extent, features, loop)
        return along, self.rows_of(source, extent, features, loop)

    def _copied(
        self, source: tuple, rows: tirx.PrimExpr, most: Extent, features: int, loop: Callable
    ) -> tuple:
        """Emit a copy of rows, of which there are at most ``most``, as pairs of features."""
        buffer, start, step = source
        pairs = ceil_div(features, self.plan.step)
        pitch = self.plan.padded(pairs)
        target = b.scratch((most + self.plan.spare) * pitch)
        with loop(0, rows) as row:
            place, to = (buffer, bind(start + row * step)), bind(row * pitch)

            def part(
                k: tirx.PrimExpr,
                number: int,
                place: tuple[Half, tirx.PrimExpr] = place,
                to: tirx.PrimExpr = to,
            ) -> None:
                self.vectors.store(target, to + k, pairs_along(place, k, features, number))

            self.vectors.each(pairs, part)
        return target, const(0), pitch

    def rows_of(
        self, source: tuple, extent: Extent, features: int, loop: Callable = b.serial
    ) -> tuple:
        """Return a copy of rows of features as rows of pairs of two neighbours."""
        buffer, start, step, *across = source
        pitch, pairs = self.plan.padded(features), ceil_div(extent, self.plan.step)
        depth = self.plan.depth_of(extent)
        target = b.scratch(depth * pitch)
        self._clear_rows(target, const(0), (pairs, depth), pitch)
        if across:
            with loop(0, pitch // self.vectors.lanes) as j:
                first = bind(j * self.vectors.lanes)

                def neighbours(
                    i: int, k: tirx.PrimExpr, number: Extent | None, first: tirx.PrimExpr = first
                ) -> tirx.PrimExpr:
                    place = buffer, bind(start + (first + i) * across[0])
                    exists = None if features == pitch else first + i < features
                    return pairs_along(place, k, extent, number, exists)

                squares(self.vectors, pairs, neighbours, target=target, to=first, width=pitch)
            return target, const(0), pitch
        with loop(0, pairs) as k:
            to = bind(k * pitch)

            def part(
                column: tirx.PrimExpr,
                number: Extent | None,
                k: tirx.PrimExpr = k,
                to: tirx.PrimExpr = to,
            ) -> None:
                rows = buffer, start + column, step
                self.vectors.store(target, to + column, pairs_across(rows, k, extent, number))

            self.vectors.each(features, part)
        return target, const(0), pitch
