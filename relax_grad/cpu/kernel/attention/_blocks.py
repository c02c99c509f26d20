"""Blocks of queries and keys of attention: their limits, their copies, and the products of their
tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tvm import tirx
from tvm.tirx import Broadcast, Ramp

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.extents import LINE
from ..language.halves import Half, Tensor
from ..language.statements import Emit
from ..matmul.tile import multiply_add, rows_up_to
from ._sizes import Attention, Head
from ._spans import Span
from ._tiles import Tiles

#: The smallest float32: the start of a maximum, so that a row of minus infinity has finite
#: differences from it.
LOWEST = -3.4028234663852886e38

#: The elements up to which rows that are not next to each other are read in place.
_CLOSE = 16384

#: The numbers of queries and of keys of a block, rounded to whole tiles.
_ROWS, _COLUMNS = 64, 128


class Panels(NamedTuple):
    """Panels of keys.

    Attributes
    ----------
    buffer : tirx.Buffer
        The panels.
    scale : float, optional
        A factor of products with them; None if they have it, or there is none.
    """

    buffer: tirx.Buffer
    scale: float | None = None


class Blocks:
    """Blocks of queries and keys.

    Attributes
    ----------
    rows, columns : int
        The numbers of queries and keys of a block.
    tile_rows, tile_vectors : int
        The size of a tile.
    key_rows : int
        The rows of a tile whose rows are keys.
    width : int
        The number of keys of a panel, as many as columns of a tile.
    panels : int
        The number of panels of a block.
    pitch : int
        The stride of the rows of scores.
    """

    #: The elements of each factor that :meth:`multiply` takes.
    step = 1

    def __init__(self, of: Attention, cpu: CPU):
        self.of, self.vectors = of, Vectors(cpu.lanes)
        self._tiles = tiles = Tiles.of(of, cpu)
        self.tile_rows, self.key_rows, self.tile_vectors = tiles.rows, tiles.key_rows, tiles.vectors
        self.set_blocks()
        #: Prefetch distance in rows, for rows of several heads that are copied.
        self._ahead = cpu.tuning.prefetch.steps

    def set_blocks(self) -> None:
        """Set the sizes of blocks by those of tiles."""
        of, lanes = self.of, self.vectors.lanes
        self.width = self.tile_vectors * lanes
        strips = _ROWS // self.tile_rows
        # Blocks have an even number of rows, as pairs do not cross them.
        self.rows = (strips - strips * self.tile_rows % 2) * self.tile_rows
        self.panels = max(1, _COLUMNS // self.width)
        if of.has_few_keys:
            self.panels = ceil_div(of.keys, self.width)
        self.columns = self.panels * self.width
        self.pitch = self.columns + lanes

    @property
    def has_one_block_of_queries(self) -> bool:
        """Whether one block has all queries, and these are so many that each key has one under a
        causal mask."""
        of = self.of
        if not isinstance(of.queries, int) or of.queries > self.rows:
            return False
        return of.causal_mask is None or (isinstance(of.keys, int) and of.keys <= of.queries)

    def refuse_large(self) -> None:
        """Emit an assertion that int32 indices can address the copies of symbolic numbers of
        queries and keys."""
        of = self.of
        widest = max(self.padded(of.features), self.padded(of.value_features))
        for extent in (of.queries, of.keys):
            b.refuse_large("attention", [extent + self.width, widest])

    def padded(self, features: int) -> int:
        """Return a number of features, rounded to whole vectors."""
        return self._tiles.padded(features)

    def each_query_block(
        self, start: Extent, emit: Emit, part: Extent | None = None, parts: int = 1
    ) -> None:
        """Emit ``emit(first, rows, span)`` for each block of queries that attends to a block of
        keys, or for all of them if one block has all keys.

        Of several parts, the blocks are those whose number has the remainder ``part``.
        """
        of = self.of
        begin, end = const(0), as_expr(ceil_div(of.queries, self.rows))
        if of.causal_mask is not None:
            begin = bind(tirx.max(const(0), start - of.offset) // self.rows)
        if of.window_size is not None and not of.has_few_keys:
            end = tirx.min(end, (start + self.columns + of.window_size - 2) // self.rows + 1)
        if parts > 1:
            begin, end = ((i - part + (parts - 1)) // parts for i in (begin, end))
        with b.serial(bind(begin), bind(tirx.max(begin, end))) as i:
            first = bind((i if parts == 1 else i * parts + part) * self.rows)
            rows = bind(tirx.min(const(self.rows), of.queries - first))
            emit(first, rows, Span(self, first, rows, start))

    def each_key_block(self, first: Extent, rows: Extent, emit: Emit) -> None:
        """Emit ``emit(span)`` for each block of keys that a block of queries attends to, or for the
        block that has all keys."""
        of = self.of
        if of.has_few_keys:
            emit(Span(self, first, rows, const(0)))
            return
        end = of.end_of(first + rows - 1)
        begin = of.start_of(first) // self.columns
        with b.serial(bind(begin), bind(tirx.max(begin, ceil_div(end, self.columns)))) as j:
            start = bind(j * self.columns)
            emit(Span(self, first, rows, start))

    # Copies

    def pack_panels(
        self,
        source: tuple,
        extent: Extent,
        features: int,
        loop: Callable,
        scale: float | None = None,
    ) -> Panels:
        """Emit a copy of rows of features as panels, ``[panel][feature][row]``, padded with zeros
        and multiplied by a factor.

        ``source`` is a buffer, the offset of the first row, the stride of the rows, and the
        stride of the features if it is not 1.
        """
        vectors, lanes, width = self.vectors, self.vectors.lanes, self.width
        buffer, start, step, *across = source
        panels = b.scratch(ceil_div(extent, width) * (features * width))
        if across:
            self._pack_columns((buffer, start, *across), extent, features, loop, scale, panels)
            return Panels(panels)
        with loop(0, ceil_div(extent, width)) as j, b.serial(0, self.tile_vectors) as v:
            row = bind(j * width + v * lanes)
            base = bind(j * (features * width) + v * lanes)
            left = self._left(extent, row)
            vectors.copy_transposed(
                (buffer, bind(start + tirx.min(row, as_expr(extent) - 1) * step), step),
                left,
                features,
                panels,
                lambda k: base + k * width,
                scale,
                strides=(width,),
            )
        return Panels(panels)

    def queries_of(self, source: tuple, rows: Extent, features: int) -> tuple:
        """Return the rows of a block of queries as the first factor of :meth:`scores`.

        ``source`` and the result are a buffer, the offset of the first row, and the stride of the
        rows.
        """
        return source

    def factors_of(
        self, source: tuple, extent: Extent, features: int, loop: Callable
    ) -> tuple[tuple, tuple]:
        """Return rows of all queries as the first factor of :meth:`scores`, and as the second one
        of :meth:`accumulate_transposed`.

        ``source`` and the results are as those of :meth:`rows_of`.
        """
        rows = self.rows_of(source, extent, features, loop)
        return rows, rows

    def _pack_columns(
        self,
        source: tuple,
        extent: Extent,
        features: int,
        loop: Callable,
        scale: float | None,
        panels: tirx.Buffer,
    ) -> None:
        """Emit the copy of :meth:`pack_panels` from features of rows that are next to each
        other.

        ``source`` is a buffer, the offset of the first row, and the stride of the features.
        """
        vectors, lanes, width = self.vectors, self.vectors.lanes, self.width
        buffer, start, across = source
        with loop(0, ceil_div(extent, width)) as j:
            first = bind(j * width)
            left = [self._left(extent, first + v * lanes) for v in range(self.tile_vectors)]
            with b.serial(0, features) as k:
                base = bind(start + k * across + first)
                to = bind((j * features + k) * width)
                for v, number in enumerate(left):
                    value = vectors.load(buffer, base + v * lanes, number)
                    value = value if scale is None else value * vectors.splat(scale)
                    vectors.store(panels, to + v * lanes, value)

    def _left(self, extent: Extent, row: Extent) -> Extent | None:
        """Return the number of rows of a vector from a row on; None if it is always whole."""
        if isinstance(extent, int) and extent % self.width == 0:
            return None
        return bind(tirx.max(const(0), tirx.min(const(self.vectors.lanes), extent - row)))

    def rows_of(
        self, source: tuple, extent: Extent, features: int, loop: Callable = b.serial
    ) -> tuple:
        """Return rows of features from which whole vectors can be loaded: rows of a tensor, or of
        a copy that is padded with zeros.

        ``source`` and the result are a buffer, the offset of the first row, and the stride of the
        rows; ``source`` also has the stride of the features if it is not 1.
        """
        if self.has_whole_vectors(source, extent, features):
            return source
        vectors, pitch = self.vectors, self.padded(features)
        target = b.scratch(extent * pitch)
        buffer, start, step, *across = source
        if across:
            lanes = vectors.lanes
            with loop(0, pitch // lanes) as j:
                first = bind(j * lanes)
                left = None
                if features % lanes:
                    left = bind(tirx.min(const(lanes), features - first))
                vectors.copy_transposed(
                    (buffer, bind(start + first * across[0]), across[0]),
                    left,
                    extent,
                    target,
                    lambda k: k * pitch + first,
                    strides=(pitch,),
                )
            return target, const(0), pitch
        with loop(0, extent) as row:
            base, to = bind(start + row * step), bind(row * pitch)
            for line in range(0, features, LINE) if self._ahead else ():
                b.prefetch(buffer, base + self._ahead * step + line, level=1)

            def part(
                k: Extent, number: Extent | None, base: Extent = base, to: Extent = to
            ) -> None:
                vectors.store(target, to + k, vectors.load(buffer, base + k, number))

            vectors.each(features, part)
        return target, const(0), pitch

    def has_whole_vectors(self, source: tuple, extent: Extent, features: int) -> bool:
        """Tell whether rows of a tensor are whole vectors of float32, close together in memory."""
        buffer, _, step, *across = source
        if across or isinstance(buffer, Half) or features % self.vectors.lanes:
            return False
        return step == features or (isinstance(extent, int) and extent * step <= _CLOSE)

    def unpack_rows(
        self, source: tuple, target: tuple, extent: Extent, features: int, loop: Callable
    ) -> None:
        """Emit a copy of padded rows to rows of features.

        ``source`` and ``target`` are a buffer, the offset of the first row, and the stride of the
        rows; ``target`` also has the stride of the features if it is not 1.
        """
        vectors, lanes = self.vectors, self.vectors.lanes
        (own, first, pitch), (buffer, start, step, *across) = source, target
        if across:
            with loop(0, ceil_div(extent, lanes)) as j:
                row = bind(j * lanes)
                left = None
                if not (isinstance(extent, int) and extent % lanes == 0):
                    left = bind(tirx.min(const(lanes), extent - row))
                vectors.copy_transposed(
                    (own, bind(first + row * pitch), pitch),
                    left,
                    features,
                    buffer,
                    lambda k: start + k * across[0] + row,
                    stored=left,
                    strides=(across[0],),
                )
            return
        with loop(0, extent) as row:
            base, to = bind(first + row * pitch), bind(start + row * step)

            def part(
                k: Extent, number: Extent | None, base: Extent = base, to: Extent = to
            ) -> None:
                vectors.store(buffer, to + k, vectors.load(own, base + k), number)

            vectors.each(features, part)

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
        depth = ceil_div(features, self.step)
        size = depth * self.width

        def finish(total: tirx.PrimExpr, _: int) -> tirx.PrimExpr:
            return total if scale is None else total * vectors.splat(scale)

        first = bind(span.start // self.width)
        with b.serial(0, bind(ceil_div(span.size, self.width))) as j:
            base = bind((first + j) * size)
            strips = bind(ceil_div(rows, self.tile_rows))
            with b.serial(span.first_strip(j), strips) as strip:
                row = bind(strip * self.tile_rows)
                offsets = self._queries_in_tile(row, rows)
                sources = [bind(start + (row + i) * pitch) for i in offsets]
                targets = [bind((row + i) * self.pitch + j * self.width) for i in offsets]
                multiply_add(
                    vectors,
                    (self.tile_rows, self.tile_vectors),
                    depth,
                    lambda i, k: buffer[sources[i] + k],
                    lambda k, v: vectors.load(source, base + k * self.width + v * vectors.lanes),
                    lambda i, v: (scores, targets[i] + v * vectors.lanes, None),
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
            to = bind(row * self.pitch)

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
        :meth:`weights_of`, and the values of the keys, from :meth:`rows_of`.

        ``total`` and ``values`` are a buffer, the offset of the first row (of the block, and of all
        keys), and the stride of the rows, which are whole vectors. Without ``add``, the products
        are the rows, which need not be whole vectors; ``shares`` has a factor of each row.
        """
        (buffer, start, step), (source, origin, pitch) = total, values
        lanes = self.vectors.lanes

        def tile(row: Extent, column: int, wide: int) -> None:
            queries = self._queries_in_tile(row, rows)
            base = bind(origin + span.start // self.step * pitch + column)
            sources = [bind((row + i) * self.pitch) for i in queries]
            targets = [bind(start + (row + i) * step + column) for i in queries]
            left = [None if add else features - column - v * lanes for v in range(wide)]

            def finish(total: tirx.PrimExpr, i: int) -> tirx.PrimExpr:
                share = None if shares is None else self.vectors.splat(shares[row + queries[i]])
                return total if share is None else total * share

            multiply_add(
                self.vectors,
                (self.tile_rows, wide),
                bind(ceil_div(span.depth_of(row), self.step)),
                lambda i, k: weights[sources[i] + k],
                lambda k, v: self.vectors.load(source, base + k * pitch + v * lanes),
                lambda i, v: (buffer, targets[i] + v * lanes, left[v]),
                add=add,
                multiply=self.multiply,
                finish=finish,
            )

        self._each_tile(rows, self.tile_rows, features, tile)

    def _queries_in_tile(self, row: Extent, rows: Extent) -> list:
        """Return the offsets of the rows of a tile from its first one, in a block of queries."""
        number = self.of.queries
        if isinstance(number, int) and number % self.tile_rows == 0:
            return list(map(const, range(self.tile_rows)))
        return rows_up_to(row, self.tile_rows, rows)

    def _keys_in_tile(self, key: Extent, span: Span) -> list:
        """Return the offsets of the rows of a tile from its first one, in a block of keys."""
        of = self.of
        if of.has_few_keys and of.causal_mask is None and of.keys % self.key_rows == 0:
            return list(map(const, range(self.key_rows)))
        return rows_up_to(key, self.key_rows, span.size)

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
        :meth:`transposed_weights_of`, and rows of the queries, from :meth:`factors_of`.

        ``total`` and ``left`` are a buffer, the offset of the first row (of all keys, and of the
        block), and the stride of the rows, which are whole vectors. Without ``add``, the products
        are the rows.
        """
        (target, origin, step), (buffer, start, pitch) = total, left
        lanes = self.vectors.lanes

        def tile(key: Extent, column: int, wide: int) -> None:
            keys = self._keys_in_tile(key, span)
            row = bind(span.first_row(key) // self.step)
            source = bind(row * self.pitch + key)
            base = bind(start + row * pitch + column)
            targets = [bind(origin + (span.start + key + i) * step + column) for i in keys]
            multiply_add(
                self.vectors,
                (self.key_rows, wide),
                bind(ceil_div(rows, self.step) - row),
                lambda i, k: weights[source + k * self.pitch + keys[i]],
                lambda k, v: self.vectors.load(buffer, base + k * pitch + v * lanes),
                lambda i, v: (target, targets[i] + v * lanes, None),
                add=add,
                multiply=self.multiply,
            )

        self._each_tile(span.size, self.key_rows, features, tile)

    def _each_tile(self, rows: Extent, height: int, features: int, tile: Callable) -> None:
        """Emit ``tile(row, column, vectors)`` for each tile of rows of features."""
        for column, wide in self._tiles.columns_of(features):
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
