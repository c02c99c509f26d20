"""The products of attention in bfloat16 with the processor's instruction for pairs of elements.

Queries and keys are pairs of features. The weights, rounded to bfloat16, are pairs of keys or, for
the gradients of keys and values, of queries; so are the rows that they multiply. Scores, their
softmax and all sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, as_expr, bind, ceil_div, const
from ..language.halves import Half, Tensor
from ..matmul.pairs import (
    add_products,
    imported,
    imported_rounding,
    pairs_across,
    pairs_along,
    rounded_in_order,
    rounded_to_pairs,
    squares,
    takes_pairs,
)
from ._blocks import Blocks, Panels
from ._sizes import Attention
from ._spans import Span


@contextmanager
def blocks_for(of: Attention, cpu: CPU, *factors: Tensor) -> Iterator[Blocks]:
    """Return a frame of statements, and the blocks for them: of tiles or of pairs, if all factors
    are bfloat16 and the CPU multiplies them, or else of elements."""
    if amx.takes_tiles(cpu, *factors):
        with amx.imported(), imported_rounding(cpu):
            yield BlocksOfTiles(of, cpu)
    elif takes_pairs(cpu, *factors):
        with imported():
            yield BlocksOfPairs(of, cpu)
    else:
        yield Blocks(of, cpu)


class BlocksOfPairs(Blocks):
    """Blocks of queries and keys whose products are of pairs; a pair is held as the 32 bits of a
    float32."""

    step = 2
    multiply = staticmethod(add_products)

    #: What the pairs that are summed over are padded to, with zeros, and the rows of a tile that a
    #: copy has beyond the last one.
    whole, spare = 1, 0

    def depth_of(self, elements: Extent) -> Extent:
        """Return the pairs of some elements, with those that are padding."""
        return ceil_div(ceil_div(elements, self.step), self.whole) * self.whole

    def _clear_rows(self, target: Tensor, start: tirx.PrimExpr, rows: tuple, width: Extent) -> None:
        """Emit zeros in rows that are padding, from the first one to before the last one."""
        first, last = rows
        if self.whole > 1:
            b.clear(target, bind(start + first * width), bind(as_expr((last - first) * width)))

    # Copies

    def pack_panels(
        self,
        source: tuple,
        extent: Extent,
        features: int,
        loop: Callable,
        scale: float | None = None,
    ) -> Panels:
        """Emit a copy of rows of features as panels, ``[panel][pair][row]``, padded with zeros."""
        vectors, lanes, width = self.vectors, self.vectors.lanes, self.width
        buffer, start, step, *across = source
        pairs, depth = ceil_div(features, self.step), self.depth_of(features)
        is_whole = isinstance(extent, int) and extent % width == 0
        panels = b.scratch(ceil_div(extent, width) * (depth * width))
        if across:
            self._pack_columns((buffer, start, *across), extent, features, loop, None, panels)
            return Panels(panels, scale)
        with loop(0, ceil_div(extent, width)) as j, b.serial(0, self.tile_vectors) as v:
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
            squares(vectors, pairs, row_of, panels, to, width)
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
        lanes, width = self.vectors.lanes, self.width
        pairs, depth = ceil_div(features, self.step), self.depth_of(features)
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
        return self._copied(source, rows, self.rows, features, b.serial)

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
        pairs = ceil_div(features, self.step)
        pitch = self.padded(pairs)
        target = b.scratch((most + self.spare) * pitch)
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
        pitch, pairs = self.padded(features), ceil_div(extent, self.step)
        depth = self.depth_of(extent)
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

                squares(self.vectors, pairs, neighbours, target, first, pitch)
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

    # Weights

    def weights_of(self, scores: tirx.Buffer, rows: tirx.PrimExpr, span: Span) -> tirx.Buffer:
        """Return the buffer of the scores, whose rows now begin with the weights as pairs of
        keys."""
        vectors, lanes = self.vectors, self.vectors.lanes
        with b.serial(0, rows) as row:
            base = bind(row * self.pitch)
            with b.serial(0, span.panels_of(row)) as j:
                at = bind(base + j * self.width)
                parts = [vectors.load(scores, at + v * lanes) for v in range(self.tile_vectors)]
                # A panel of one vector is the only one.
                low, high = (*parts, vectors.splat(0))[:2]
                vectors.store(scores, base + j * (self.width // 2), rounded_in_order(low, high))
        return scores

    def transposed_weights_of(
        self, scores: tirx.Buffer, rows: tirx.PrimExpr, span: Span
    ) -> tirx.Buffer:
        """Return a copy of the weights as rows of pairs of queries."""
        vectors = self.vectors
        target = b.scratch(ceil_div(self.rows, self.step) * self.pitch)
        number = bind(ceil_div(span.size, self.width) * self.tile_vectors)
        with b.serial(0, bind(ceil_div(rows, self.step))) as pair:
            left = None
            if not (isinstance(self.of.queries, int) and self.of.queries % 2 == 0):
                whole = as_expr(vectors.lanes)
                left = bind(tirx.Select(2 * pair + 1 < rows, whole, const(0)))
            first, to = bind(2 * pair * self.pitch), bind(pair * self.pitch)
            with b.serial(0, number) as v:
                at = bind(v * vectors.lanes)
                low = vectors.load(scores, first + at)
                high = vectors.load(scores, first + self.pitch + at, left)
                vectors.store(target, to + at, rounded_to_pairs(low, high))
        return target


class BlocksOfTiles(BlocksOfPairs):
    """Blocks of queries and keys whose products are by tiles (AMX)."""

    whole, spare = amx.STEPS, amx.ROWS

    def __init__(self, of: Attention, cpu: CPU):
        super().__init__(of, cpu)
        self.tile_rows = self.key_rows = amx.ROWS
        self.tile_vectors = 1 if of.has_few_keys and of.keys <= cpu.lanes else 2
        self.set_blocks()

    def _product(
        self, a: tuple, panel: tuple, steps: Extent, size: tuple, finish: Callable
    ) -> None:
        """Emit a tile: ``finish(i, v, sums)`` stores vector v of row i.

        ``a`` and ``panel`` are a buffer, the offset of the first row, and the distance of rows in
        elements of float32; ``size`` has the rows, which may be fewer than a tile has, and the
        vectors of a row.
        """
        (rows, wide), sums = size, amx.scratch()
        left, right = ((buffer, at, as_expr(4 * pitch)) for buffer, at, pitch in (a, panel))
        with amx.tiles():
            amx.clear(sums, rows)
            amx.add(sums, left, right, steps, rows, wide)
            amx.store(sums, rows)
        lanes = self.vectors.lanes
        with b.serial(0, rows) as i:
            for v in range(wide):
                finish(i, v, bind(self.vectors.load(sums, i * amx.COLUMNS + v * lanes)))

    def scores(
        self,
        left: tuple,
        panels: Panels,
        features: int,
        scores: tirx.Buffer,
        rows: tirx.PrimExpr,
        span: Span,
    ) -> None:
        (buffer, start, pitch), (source, scale), vectors = left, panels, self.vectors
        depth = self.depth_of(features)
        size = depth * self.width
        first = bind(span.start // self.width)
        with b.serial(0, bind(ceil_div(span.size, self.width))) as j:
            base = bind((first + j) * size)
            with b.serial(span.first_strip(j), bind(ceil_div(rows, self.tile_rows))) as strip:
                row = bind(strip * self.tile_rows)
                number = bind(tirx.min(const(self.tile_rows), rows - row))
                to = bind(row * self.pitch + j * self.width)

                def finish(
                    i: tirx.PrimExpr, v: int, total: tirx.PrimExpr, to: tirx.PrimExpr = to
                ) -> None:
                    value = total if scale is None else total * vectors.splat(scale)
                    vectors.store(scores, to + i * self.pitch + v * vectors.lanes, value)

                self._product(
                    (buffer, bind(start + row * pitch), pitch),
                    (source, base, self.width),
                    depth // amx.STEPS,
                    (number, self.tile_vectors),
                    finish,
                )

    def weights_of(self, scores: tirx.Buffer, rows: tirx.PrimExpr, span: Span) -> tirx.Buffer:
        super().weights_of(scores, rows, span)
        # A tile reads all keys of a step: the weights of those that do not exist may be anything.
        vectors, lanes = self.vectors, self.vectors.lanes
        with b.serial(0, rows) as row:
            pairs = bind(ceil_div(span.depth_of(row), self.step))
            last = bind(b.quotient(pairs, lanes))
            with b.when(last * lanes < pairs):
                at = bind(row * self.pitch + last * lanes)
                left = bind(pairs - last * lanes)
                vectors.store(scores, at, vectors.load(scores, at, left))
        return scores

    def transposed_weights_of(
        self, scores: tirx.Buffer, rows: tirx.PrimExpr, span: Span
    ) -> tirx.Buffer:
        """Return a copy of the weights as rows of keys, with pairs of queries."""
        vectors, lanes = self.vectors, self.vectors.lanes
        pitch = self._query_pitch
        target = b.scratch(self.columns * pitch)
        number = bind(ceil_div(span.size, self.width) * self.tile_vectors)
        with b.serial(0, bind(ceil_div(rows, self.step * lanes))) as block:
            first = bind(block * (self.step * lanes))
            with b.serial(0, number) as v:
                pairs = []
                for i in range(lanes):
                    parts = []
                    for odd in range(self.step):
                        row = first + (self.step * i + odd)
                        exists = bind(tirx.Select(row < rows, const(lanes), const(0)))
                        at = bind(row * self.pitch + v * lanes)
                        parts.append(vectors.load(scores, at, exists))
                    pairs.append(bind(rounded_to_pairs(*parts)))
                for i, row in enumerate(vectors.transpose(pairs)):
                    vectors.store(target, (v * lanes + i) * pitch + block * lanes, row)
        return target

    @property
    def _query_pitch(self) -> int:
        """The distance of the rows of transposed weights."""
        return self.rows // self.step + self.vectors.lanes

    def accumulate(
        self,
        total: tuple,
        values: tuple,
        features: int,
        weights: tirx.Buffer,
        rows: tirx.PrimExpr,
        span: Span,
        *,
        add: bool = True,
        shares: tirx.Buffer | None = None,
    ) -> None:
        (buffer, start, step), (source, origin, pitch) = total, values
        vectors, lanes = self.vectors, self.vectors.lanes

        def tile(row: tirx.PrimExpr, column: int, wide: int) -> None:
            number = bind(tirx.min(const(self.tile_rows), rows - row))
            to = bind(start + row * step + column)
            left = [None if add else features - column - v * lanes for v in range(wide)]

            def finish(i: tirx.PrimExpr, v: int, value: tirx.PrimExpr) -> None:
                at = bind(to + i * step + v * lanes)
                if shares is not None:
                    value = value * vectors.splat(shares[row + i])
                if add:
                    value = value + vectors.load(buffer, at)
                vectors.store(buffer, at, value, left[v])

            self._product(
                (weights, bind(row * self.pitch), self.pitch),
                (source, bind(origin + span.start // self.step * pitch + column), pitch),
                bind(ceil_div(span.depth_of(row), self.step * amx.STEPS)),
                (number, wide),
                finish,
            )

        self._each_tile(rows, self.tile_rows, features, tile)

    def accumulate_transposed(
        self,
        total: tuple,
        left: tuple,
        features: int,
        weights: tirx.Buffer,
        rows: tirx.PrimExpr,
        span: Span,
        *,
        add: bool = True,
    ) -> None:
        (target, origin, step), (buffer, start, pitch) = total, left
        vectors, lanes = self.vectors, self.vectors.lanes

        def tile(key: tirx.PrimExpr, column: int, wide: int) -> None:
            number = bind(tirx.min(const(self.key_rows), span.size - key))
            block = bind(span.first_row(key) // (self.step * amx.STEPS))
            blocks = bind(ceil_div(rows, self.step * amx.STEPS))
            pair = bind(block * amx.STEPS)
            to = bind(origin + (span.start + key) * step + column)

            def finish(i: tirx.PrimExpr, v: int, value: tirx.PrimExpr) -> None:
                at = bind(to + i * step + v * lanes)
                if add:
                    value = value + vectors.load(target, at)
                vectors.store(target, at, value)

            self._product(
                (weights, bind(key * self._query_pitch + pair), self._query_pitch),
                (buffer, bind(start + pair * pitch + column), pitch),
                bind(tirx.max(const(0), blocks - block)),
                (number, wide),
                finish,
            )

        self._each_tile(span.size, self.key_rows, features, tile)

    def _each_tile(self, rows: tirx.PrimExpr, height: int, features: int, tile: Callable) -> None:
        vectors = ceil_div(features, self.vectors.lanes)
        for column in range(0, vectors, 2):
            with b.serial(0, bind(ceil_div(rows, height))) as strip:
                tile(bind(strip * height), column * self.vectors.lanes, min(2, vectors - column))
