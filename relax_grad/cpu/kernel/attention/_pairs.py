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
from ..language.halves import Tensor
from ..matmul.pairs import (
    add_products,
    imported,
    imported_rounding,
    rounded_in_order,
    rounded_to_pairs,
    takes_pairs,
)
from ._blocks import Blocks
from ._copies import Panels
from ._pair_copies import CopiesOfPairs
from ._spans import Span
from .plan import AttentionPlan, attention_plan
from .sizes import Attention


@contextmanager
def blocks_for(of: Attention, cpu: CPU, *factors: Tensor) -> Iterator[Blocks]:
    """Return a frame of statements, and the blocks for them: of tiles or of pairs, if all factors
    are bfloat16 and the CPU multiplies them, or else of elements."""
    if amx.takes_tiles(cpu, *factors):
        with amx.imported(), imported_rounding(cpu):
            yield BlocksOfTiles(attention_plan(of, cpu, "tiles"))
    elif takes_pairs(cpu, *factors):
        with imported():
            yield BlocksOfPairs(attention_plan(of, cpu, "pairs"))
    else:
        yield Blocks(attention_plan(of, cpu))


class BlocksOfPairs(Blocks):
    """Blocks of queries and keys whose products are of pairs; a pair is held as the 32 bits of a
    float32."""

    multiply = staticmethod(add_products)

    def __init__(self, plan: AttentionPlan):
        super().__init__(plan, CopiesOfPairs(plan))

    def weights_of(self, scores: tirx.Buffer, rows: tirx.PrimExpr, span: Span) -> tirx.Buffer:
        """Return the buffer of the scores, whose rows now begin with the weights as pairs of
        keys."""
        vectors, lanes = self.vectors, self.vectors.lanes
        with b.serial(0, rows) as row:
            base = bind(row * self.plan.pitch)
            with b.serial(0, span.panels_of(row)) as j:
                at = bind(base + j * self.plan.width)
                parts = [
                    vectors.load(scores, at + v * lanes) for v in range(self.plan.tile_vectors)
                ]
                # A panel of one vector is the only one.
                low, high = (*parts, vectors.splat(0))[:2]
                vectors.store(
                    scores, base + j * (self.plan.width // 2), rounded_in_order(low, high)
                )
        return scores

    def transposed_weights_of(
        self, scores: tirx.Buffer, rows: tirx.PrimExpr, span: Span
    ) -> tirx.Buffer:
        """Return a copy of the weights as rows of pairs of queries."""
        vectors = self.vectors
        target = b.scratch(ceil_div(self.plan.rows, self.plan.step) * self.plan.pitch)
        number = bind(ceil_div(span.size, self.plan.width) * self.plan.tile_vectors)
        with b.serial(0, bind(ceil_div(rows, self.plan.step))) as pair:
            left = None
            if not (isinstance(self.of.queries, int) and self.of.queries % 2 == 0):
                whole = as_expr(vectors.lanes)
                left = bind(tirx.Select(2 * pair + 1 < rows, whole, const(0)))
            first, to = bind(2 * pair * self.plan.pitch), bind(pair * self.plan.pitch)
            with b.serial(0, number) as v:
                at = bind(v * vectors.lanes)
                low = vectors.load(scores, first + at)
                high = vectors.load(scores, first + self.plan.pitch + at, left)
                vectors.store(target, to + at, rounded_to_pairs(low, high))
        return target


class BlocksOfTiles(BlocksOfPairs):
    """Blocks of queries and keys whose products are by tiles (AMX)."""

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
            amx.add(sums, left, right, steps=steps, rows=rows, vectors=wide)
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
        depth = self.plan.depth_of(features)
        size = depth * self.plan.width
        first = bind(span.start // self.plan.width)
        with b.serial(0, bind(ceil_div(span.size, self.plan.width))) as j:
            base = bind((first + j) * size)
            with b.serial(span.first_strip(j), bind(ceil_div(rows, self.plan.tile_rows))) as strip:
                row = bind(strip * self.plan.tile_rows)
                number = bind(tirx.min(const(self.plan.tile_rows), rows - row))
                to = bind(row * self.plan.pitch + j * self.plan.width)

                def finish(
                    i: tirx.PrimExpr, v: int, total: tirx.PrimExpr, to: tirx.PrimExpr = to
                ) -> None:
                    value = total if scale is None else total * vectors.splat(scale)
                    vectors.store(scores, to + i * self.plan.pitch + v * vectors.lanes, value)

                self._product(
                    (buffer, bind(start + row * pitch), pitch),
                    (source, base, self.plan.width),
                    depth // amx.STEPS,
                    (number, self.plan.tile_vectors),
                    finish,
                )

    def weights_of(self, scores: tirx.Buffer, rows: tirx.PrimExpr, span: Span) -> tirx.Buffer:
        super().weights_of(scores, rows, span)
        # A tile reads all keys of a step: the weights of those that do not exist may be anything.
        vectors, lanes = self.vectors, self.vectors.lanes
        with b.serial(0, rows) as row:
            pairs = bind(ceil_div(span.depth_of(row), self.plan.step))
            last = bind(b.quotient(pairs, lanes))
            with b.when(last * lanes < pairs):
                at = bind(row * self.plan.pitch + last * lanes)
                left = bind(pairs - last * lanes)
                vectors.store(scores, at, vectors.load(scores, at, left))
        return scores

    def transposed_weights_of(
        self, scores: tirx.Buffer, rows: tirx.PrimExpr, span: Span
    ) -> tirx.Buffer:
        """Return a copy of the weights as rows of keys, with pairs of queries."""
        vectors, lanes = self.vectors, self.vectors.lanes
        pitch = self._query_pitch
        target = b.scratch(self.plan.columns * pitch)
        number = bind(ceil_div(span.size, self.plan.width) * self.plan.tile_vectors)
        with b.serial(0, bind(ceil_div(rows, self.plan.step * lanes))) as block:
            first = bind(block * (self.plan.step * lanes))
            with b.serial(0, number) as v:
                pairs = []
                for i in range(lanes):
                    parts = []
                    for odd in range(self.plan.step):
                        row = first + (self.plan.step * i + odd)
                        exists = bind(tirx.Select(row < rows, const(lanes), const(0)))
                        at = bind(row * self.plan.pitch + v * lanes)
                        parts.append(vectors.load(scores, at, exists))
                    pairs.append(bind(rounded_to_pairs(*parts)))
                for i, row in enumerate(vectors.transpose(pairs)):
                    vectors.store(target, (v * lanes + i) * pitch + block * lanes, row)
        return target

    @property
    def _query_pitch(self) -> int:
        """The distance of the rows of transposed weights."""
        return self.plan.rows // self.plan.step + self.vectors.lanes

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
            number = bind(tirx.min(const(self.plan.tile_rows), rows - row))
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
                (weights, bind(row * self.plan.pitch), self.plan.pitch),
                (source, bind(origin + span.start // self.plan.step * pitch + column), pitch),
                bind(ceil_div(span.depth_of(row), self.plan.step * amx.STEPS)),
                (number, wide),
                finish,
            )

        self._each_tile(rows, self.plan.tile_rows, features, tile)

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
            number = bind(tirx.min(const(self.plan.key_rows), span.size - key))
            block = bind(span.first_row(key) // (self.plan.step * amx.STEPS))
            blocks = bind(ceil_div(rows, self.plan.step * amx.STEPS))
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

        self._each_tile(span.size, self.plan.key_rows, features, tile)

    def _each_tile(self, rows: tirx.PrimExpr, height: int, features: int, tile: Callable) -> None:
        vectors = ceil_div(features, self.vectors.lanes)
        for column in range(0, vectors, 2):
            with b.serial(0, bind(ceil_div(rows, height))) as strip:
                tile(bind(strip * height), column * self.vectors.lanes, min(2, vectors - column))
