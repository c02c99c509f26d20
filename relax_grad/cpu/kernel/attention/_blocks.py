"""Blocks of queries and keys of attention: their limits, and the products of their tiles."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx import Broadcast, Ramp

from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.statements import Emit
from ..matmul.tile import multiply_add, rows_up_to
from ._copies import Copies, Panels
from ._spans import Span
from .plan import AttentionPlan
from .sizes import Head

#: The smallest float32: the start of a maximum, so that a row of minus infinity has finite
#: differences from it.
LOWEST = -3.4028234663852886e38


class Blocks:
    """Blocks of queries and keys.

    Attributes
    ----------
    plan : AttentionPlan
        The sizes of blocks and tiles.
    copies : Copies
        The copies of rows and panels.
    """

    def __init__(self, plan: AttentionPlan, copies: Copies | None = None):
        self.plan, self.of, self.vectors = plan, plan.of, Vectors(plan.lanes)
        self.copies = Copies(plan) if copies is None else copies

    def refuse_large(self) -> None:
        """Emit an assertion that int32 indices can address the copies of symbolic numbers of
        queries and keys."""
        of = self.of
        widest = max(self.plan.padded(of.features), self.plan.padded(of.value_features))
        for extent in (of.queries, of.keys):
            b.refuse_large("attention", [extent + self.plan.width, widest])

    def each_query_block(
        self, start: Extent, emit: Emit, part: Extent | None = None, parts: int = 1
    ) -> None:
        """Emit ``emit(first, rows, span)`` for each block of queries that attends to a block of
        keys, or for all of them if one block has all keys.

        Of several parts, the blocks are those whose number has the remainder ``part``.
        """
        of = self.of
        begin, end = const(0), as_expr(ceil_div(of.queries, self.plan.rows))
        if of.causal_mask is not None:
            begin = bind(tirx.max(const(0), start - of.offset) // self.plan.rows)
        if of.window_size is not None and not of.has_few_keys:
            end = tirx.min(
                end, (start + self.plan.columns + of.window_size - 2) // self.plan.rows + 1
            )
        if parts > 1:
            begin, end = ((i - part + (parts - 1)) // parts for i in (begin, end))
        with b.serial(bind(begin), bind(tirx.max(begin, end))) as i:
            first = bind((i if parts == 1 else i * parts + part) * self.plan.rows)
            rows = bind(tirx.min(const(self.plan.rows), of.queries - first))
            emit(first, rows, Span(self.plan, first, rows, start))

    def each_key_block(self, first: Extent, rows: Extent, emit: Emit) -> None:
        """Emit ``emit(span)`` for each block of keys that a block of queries attends to, or for the
        block that has all keys."""
        of = self.of
        if of.has_few_keys:
            emit(Span(self.plan, first, rows, const(0)))
            return
        end = of.end_of(first + rows - 1)
        begin = of.start_of(first) // self.plan.columns
        with b.serial(bind(begin), bind(tirx.max(begin, ceil_div(end, self.plan.columns)))) as j:
            start = bind(j * self.plan.columns)
            emit(Span(self.plan, first, rows, start))

    # Products

    @staticmethod
    def multiply(total: tirx.PrimExpr, a: Extent, b: Extent, /) -> tirx.PrimExpr:
        """Return a sum with the product of vectors added."""
        return total + a * b

    def weights_of(self, scores: tirx.Buffer, rows: Extent, span: Span) -> tirx.Buffer:
        """Return the weights of a block as the first factor of :meth:`accumulate`; their buffer may
        be overwritten."""
        return scores

    def transposed_weights_of(self, scores: tirx.Buffer, rows: Extent, span: Span) -> tirx.Buffer:
        """Return the weights of a block as the first factor of :meth:`accumulate_transposed`."""
        return scores

    def scores(
        self,
        left: tuple,
        panels: Panels,
        features: int,
        scores: tirx.Buffer,
        rows: Extent,
        span: Span,
    ) -> None:
        """Emit the products of rows of features and panels of keys, in tiles with a query that
        attends to a key.

        ``left`` is a buffer, the offset of the first row of the block, and the stride of the rows.
        """
        vectors = self.vectors
        buffer, start, pitch = left
        source, scale = panels
        depth = ceil_div(features, self.plan.step)
        size = depth * self.plan.width

        def finish(total: tirx.PrimExpr, _: int) -> tirx.PrimExpr:
            return total if scale is None else total * vectors.splat(scale)

        first = bind(span.start // self.plan.width)
        with b.serial(0, bind(ceil_div(span.size, self.plan.width))) as j:
            base = bind((first + j) * size)
            strips = bind(ceil_div(rows, self.plan.tile_rows))
            with b.serial(span.first_strip(j), strips) as strip:
                row = bind(strip * self.plan.tile_rows)
                offsets = self._queries_in_tile(row, rows)
                sources = [bind(start + (row + i) * pitch) for i in offsets]
                targets = [bind((row + i) * self.plan.pitch + j * self.plan.width) for i in offsets]
                multiply_add(
                    vectors,
                    (self.plan.tile_rows, self.plan.tile_vectors),
                    depth,
                    value=lambda i, k: buffer[sources[i] + k],
                    vector=lambda k, v: vectors.load(
                        source, base + k * self.plan.width + v * vectors.lanes
                    ),
                    place=lambda i, v: (scores, targets[i] + v * vectors.lanes, None),
                    add=False,
                    multiply=self.multiply,
                    finish=finish,
                )

    def add_bias(
        self, bias: Tensor, head: Head, scores: tirx.Buffer, rows: Extent, span: Span
    ) -> None:
        """Emit the addition of the bias to the scores of a block that exist."""
        vectors, of = self.vectors, self.of
        with b.serial(0, rows) as row:
            start = bind(of.bias_start(head.batch, head.number, span.query(row)))
            to = bind(row * self.plan.pitch)

            def part(
                k: Extent, number: Extent | None, start: Extent = start, to: Extent = to
            ) -> None:
                if of.shares_bias:
                    value = vectors.splat(bias[start])
                else:
                    value = vectors.load(bias, start + span.start + k, number)
                vectors.store(scores, to + k, vectors.load(scores, to + k) + value)

            vectors.each(span.extent_of(row, is_masked=True), part)

    def accumulate(
        self,
        total: tuple,
        values: tuple,
        features: int,
        weights: tirx.Buffer,
        rows: Extent,
        span: Span,
        *,
        add: bool = True,
        shares: tirx.Buffer | None = None,
    ) -> None:
        """Emit the addition to rows of queries of the products of the weights, from
        :meth:`weights_of`, and the values of the keys, from :meth:`.Copies.rows_of`.

        ``total`` and ``values`` are a buffer, the offset of the first row (of the block, and of all
        keys), and the stride of the rows, which are whole vectors. Without ``add``, the products
        are the rows, which need not be whole vectors; ``shares`` has a factor of each row.
        """
        (buffer, start, step), (source, origin, pitch) = total, values
        lanes = self.vectors.lanes

        def tile(row: Extent, column: int, wide: int) -> None:
            queries = self._queries_in_tile(row, rows)
            base = bind(origin + span.start // self.plan.step * pitch + column)
            sources = [bind((row + i) * self.plan.pitch) for i in queries]
            targets = [bind(start + (row + i) * step + column) for i in queries]
            left = [None if add else features - column - v * lanes for v in range(wide)]

            def finish(total: tirx.PrimExpr, i: int) -> tirx.PrimExpr:
                share = None if shares is None else self.vectors.splat(shares[row + queries[i]])
                return total if share is None else total * share

            multiply_add(
                self.vectors,
                (self.plan.tile_rows, wide),
                bind(ceil_div(span.depth_of(row), self.plan.step)),
                value=lambda i, k: weights[sources[i] + k],
                vector=lambda k, v: self.vectors.load(source, base + k * pitch + v * lanes),
                place=lambda i, v: (buffer, targets[i] + v * lanes, left[v]),
                add=add,
                multiply=self.multiply,
                finish=finish,
            )

        self._each_tile(rows, self.plan.tile_rows, features, tile)

    def _queries_in_tile(self, row: Extent, rows: Extent) -> list:
        """Return the offsets of the rows of a tile from its first one, in a block of queries."""
        number = self.of.queries
        if isinstance(number, int) and number % self.plan.tile_rows == 0:
            return list(map(const, range(self.plan.tile_rows)))
        return rows_up_to(row, self.plan.tile_rows, rows)

    def _keys_in_tile(self, key: Extent, span: Span) -> list:
        """Return the offsets of the rows of a tile from its first one, in a block of keys."""
        of = self.of
        if of.has_few_keys and of.causal_mask is None and of.keys % self.plan.key_rows == 0:
            return list(map(const, range(self.plan.key_rows)))
        return rows_up_to(key, self.plan.key_rows, span.size)

    def accumulate_transposed(
        self,
        total: tuple,
        left: tuple,
        features: int,
        weights: tirx.Buffer,
        rows: Extent,
        span: Span,
        *,
        add: bool = True,
    ) -> None:
        """Emit the addition to rows of keys of the products of the transposed weights, from
        :meth:`transposed_weights_of`, and rows of the queries, from :meth:`.Copies.factors_of`.

        ``total`` and ``left`` are a buffer, the offset of the first row (of all keys, and of the
        block), and the stride of the rows, which are whole vectors. Without ``add``, the products
        are the rows.
        """
        (target, origin, step), (buffer, start, pitch) = total, left
        lanes = self.vectors.lanes

        def tile(key: Extent, column: int, wide: int) -> None:
            keys = self._keys_in_tile(key, span)
            row = bind(span.first_row(key) // self.plan.step)
            source = bind(row * self.plan.pitch + key)
            base = bind(start + row * pitch + column)
            targets = [bind(origin + (span.start + key + i) * step + column) for i in keys]
            multiply_add(
                self.vectors,
                (self.plan.key_rows, wide),
                bind(ceil_div(rows, self.plan.step) - row),
                value=lambda i, k: weights[source + k * self.plan.pitch + keys[i]],
                vector=lambda k, v: self.vectors.load(buffer, base + k * pitch + v * lanes),
                place=lambda i, v: (target, targets[i] + v * lanes, None),
                add=add,
                multiply=self.multiply,
            )

        self._each_tile(span.size, self.plan.key_rows, features, tile)

    def _each_tile(self, rows: Extent, height: int, features: int, tile: Callable) -> None:
        """Emit ``tile(row, column, vectors)`` for each tile of rows of features."""
        for column, wide in self.plan.tiles.columns_of(features):
            with b.serial(0, bind(ceil_div(rows, height))) as strip:
                tile(bind(strip * height), column, wide)

    def only_between(
        self, vector: tirx.PrimExpr, start: Extent, low: Extent | None, high: Extent
    ) -> tirx.PrimExpr:
        """Return a vector with minus infinity in the lanes of keys outside limits, given the key of
        the first lane."""
        lanes = self.vectors.lanes
        index = Ramp(start, const(1), lanes)
        inside = tirx.LT(index, Broadcast(high, lanes))
        if low is not None:
            inside = tirx.And(inside, tirx.GE(index, Broadcast(low, lanes)))
        return tirx.Select(inside, vector, self.vectors.splat(float("-inf")))
