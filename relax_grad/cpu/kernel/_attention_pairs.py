"""The products of attention in bfloat16 with the processor's instruction for pairs of elements.

Queries and keys are pairs of features. The weights, rounded to bfloat16, are pairs of keys or, for
the gradients of keys and values, of queries; so are the rows that they multiply. Scores, their
softmax and all sums are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx

from ..target import CPU
from . import builder as b
from ._attention_blocks import Blocks, Panels
from ._attention_sizes import Attention
from ._attention_spans import Span
from ._pairs import (
    add_products,
    imported,
    pairs_across,
    pairs_along,
    rounded_in_order,
    rounded_to_pairs,
    squares,
    takes_pairs,
)
from .builder import Extent, as_expr, bind, ceil_div, const


@contextmanager
def blocks_for(of: Attention, cpu: CPU, *factors) -> Iterator[Blocks]:
    """Return a frame of statements, and the blocks for them: of pairs, if all factors are bfloat16
    and the CPU multiplies them, or else of elements."""
    if takes_pairs(cpu, *factors):
        with imported():
            yield BlocksOfPairs(of, cpu)
    else:
        yield Blocks(of, cpu)


class BlocksOfPairs(Blocks):
    """Blocks of queries and keys whose products are of pairs; a pair is held as the 32 bits of a
    float32."""

    step = 2
    multiply = staticmethod(add_products)

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
        depth = ceil_div(features, self.step)
        is_whole = isinstance(extent, int) and extent % width == 0
        panels = b.scratch(ceil_div(extent, width) * (depth * width))
        if across:
            self._pack_columns((buffer, start, *across), extent, features, loop, None, panels)
            return Panels(panels, scale)
        with loop(0, ceil_div(extent, width)) as j, b.serial(0, self.tile_vectors) as v:
            first = bind(j * width + v * lanes)
            left = None if is_whole else bind(extent - first)

            def pairs(row: int, k, number, first=first, left=left):
                exists = None if left is None else left > row
                place = buffer, bind(start + (first + row) * step)
                return pairs_along(place, k, features, number, exists)

            to = bind(j * (depth * width) + v * lanes)
            squares(vectors, depth, pairs, panels, to, width)
        return Panels(panels, scale)  # the products of bfloat16 would be less accurate with it

    def _pack_columns(self, source: tuple, extent: Extent, features: int, loop, scale, panels):
        lanes, width, depth = self.vectors.lanes, self.width, ceil_div(features, self.step)
        buffer, start, across = source
        with loop(0, ceil_div(extent, width)) as j:
            first = bind(j * width)
            parts = [
                ((buffer, bind(start + first + at), across), at, self._left(extent, first + at))
                for at in range(0, width, lanes)
            ]
            with b.serial(0, depth) as k:
                to = bind((j * depth + k) * width)
                for rows, at, number in parts:
                    self.vectors.store(panels, to + at, pairs_across(rows, k, features, number))

    def queries_of(self, source: tuple, rows, features: int) -> tuple:
        return self._copied(source, rows, self.rows, features, b.serial)

    def factors_of(
        self, source: tuple, extent: Extent, features: int, loop: Callable
    ) -> tuple[tuple, tuple]:
        along = self._copied(source, extent, extent, features, loop)
        return along, self.rows_of(source, extent, features, loop)

    def _copied(self, source: tuple, rows, most: Extent, features: int, loop: Callable) -> tuple:
        """Emit a copy of rows, of which there are at most ``most``, as pairs of features."""
        buffer, start, step = source
        pairs = ceil_div(features, self.step)
        pitch = self.padded(pairs)
        target = b.scratch(most * pitch)
        with loop(0, rows) as row:
            place, to = (buffer, bind(start + row * step)), bind(row * pitch)

            def part(k, number, place=place, to=to) -> None:
                self.vectors.store(target, to + k, pairs_along(place, k, features, number))

            self.vectors.each(pairs, part)
        return target, const(0), pitch

    def rows_of(
        self, source: tuple, extent: Extent, features: int, loop: Callable = b.serial
    ) -> tuple:
        """Return a copy of rows of features as rows of pairs of two neighbours."""
        buffer, start, step, *across = source
        pitch, pairs = self.padded(features), ceil_div(extent, self.step)
        target = b.scratch(pairs * pitch)
        if across:
            with loop(0, pitch // self.vectors.lanes) as j:
                first = bind(j * self.vectors.lanes)

                def neighbours(i: int, k, number, first=first):
                    place = buffer, bind(start + (first + i) * across[0])
                    exists = None if features == pitch else first + i < features
                    return pairs_along(place, k, extent, number, exists)

                squares(self.vectors, pairs, neighbours, target, first, pitch)
            return target, const(0), pitch
        with loop(0, pairs) as k:
            to = bind(k * pitch)

            def part(column, number, k=k, to=to) -> None:
                rows = buffer, start + column, step
                self.vectors.store(target, to + column, pairs_across(rows, k, extent, number))

            self.vectors.each(features, part)
        return target, const(0), pitch

    # Weights

    def weights_of(self, scores, rows, span: Span) -> tirx.Buffer:
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

    def transposed_weights_of(self, scores, rows, span: Span) -> tirx.Buffer:
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
