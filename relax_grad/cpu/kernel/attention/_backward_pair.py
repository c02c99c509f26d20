"""The gradients of a block of queries and a block of keys in attention's backward kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..language import builder as b
from ..language import functions as math
from ..language.builder import Extent, bind, ceil_div, const
from ..language.row_sums import Sums
from ._blocks import Blocks
from ._dropout import Dropout
from ._spans import Span
from .sizes import Attention, Head


@dataclass(frozen=True)
class _Block:
    """The scores of a block of queries and a block of keys.

    Attributes
    ----------
    first : PrimExpr
        The first query.
    span : Span
        The keys.
    weights : Buffer
        The scores, and then the weights.
    grads : Buffer
        The gradients of the weights, and then the gradients of the scores.
    factors : Buffer, optional
        The factors of a row, if weights are dropped.
    """

    first: tirx.PrimExpr
    span: Span
    weights: tirx.Buffer
    grads: tirx.Buffer
    factors: tirx.Buffer | None


@dataclass(frozen=True)
class _Row:
    """A row of a block.

    Attributes
    ----------
    number : PrimExpr
        The number of the row in the block.
    base : PrimExpr
        The offset of the row in the buffers of the block.
    place : PrimExpr
        The number of the row among all queries.
    start : PrimExpr or None
        The offset of the factors, if weights are dropped.
    panels : PrimExpr
        The panels of keys that a mask leaves.
    is_masked : bool
        Whether a mask leaves out keys of the block.
    """

    number: tirx.PrimExpr
    base: tirx.PrimExpr
    place: tirx.PrimExpr
    start: tirx.PrimExpr | None
    panels: tirx.PrimExpr
    is_masked: bool


@dataclass(frozen=True)
class Common:
    """The values that all pairs of a kernel share.

    Attributes
    ----------
    of : Attention
        The attention.
    blocks : Blocks
        The emission of blocks.
    dropout : Dropout, optional
        The factors, if weights are dropped.
    bias : Buffer, optional
        The bias.
    sums : Buffer
        The weights, or the largest score and the logarithm of the sum of each row.
    has_weights : bool
        Whether ``sums`` has the weights.
    adds : bool
        Whether the gradients of keys and values are added to earlier ones.
    """

    of: Attention
    blocks: Blocks
    dropout: Dropout | None
    bias: tirx.Buffer | None
    sums: tirx.Buffer
    has_weights: bool
    adds: bool


class Pair:
    """The gradients of a block of queries and a block of keys."""

    def __init__(self, common: Common, head: Head, packed: tuple, rows: tuple, totals: tuple):
        self._of, self._blocks, self._head = common.of, common.blocks, head
        self._bias, self._sums, self._dropout = common.bias, common.sums, common.dropout
        self._keys, self._values, self._key_rows = packed
        self._query, self._grad, self._inner = rows
        self._query_grad, self._key_grad, self._value_grad = totals
        self._has_weights, self._adds = common.has_weights, common.adds

    def emit(
        self,
        first: tirx.PrimExpr,
        rows: tirx.PrimExpr,
        span: Span,
        with_keys: bool,
        with_queries: bool,
    ) -> None:
        """Emit the additions to the gradients: of keys and values, of queries, or of all."""
        of, blocks = self._of, self._blocks
        features, value_features = of.features, of.value_features
        query, grad, query_grad = (
            (buffer, bind(start + first * step), step)
            for buffer, start, step in (self._query[0], self._grad[0], self._query_grad)
        )
        query_rows, grad_rows = (
            (buffer, bind(start + first // blocks.plan.step * step), step)
            for buffer, start, step in (self._query[1], self._grad[1])
        )
        weights, grads = (b.scratch(blocks.plan.rows * blocks.plan.pitch) for _ in range(2))
        factors = self._dropout.scratch() if self._dropout else None
        block = _Block(first, span, weights, grads, factors)
        if not self._has_weights:
            blocks.scores(query, self._keys, features, scores=weights, rows=rows, span=span)
            if self._bias is not None:
                blocks.add_bias(self._bias, self._head, weights, rows, span)
        blocks.scores(grad, self._values, value_features, scores=grads, rows=rows, span=span)

        def each_row(is_masked: bool) -> None:
            with b.serial(0, rows) as row:
                self._row(block, row, is_masked)

        b.either(span.is_whole(rows), lambda: each_row(False), lambda: each_row(True))
        if with_keys:
            adds = self._adds
            factor = blocks.transposed_weights_of(weights, rows, span)
            blocks.accumulate_transposed(
                self._value_grad,
                grad_rows,
                value_features,
                weights=factor,
                rows=rows,
                span=span,
                add=adds,
            )
            factor = blocks.transposed_weights_of(grads, rows, span)
            blocks.accumulate_transposed(
                self._key_grad, query_rows, features, weights=factor, rows=rows, span=span, add=adds
            )
        if with_queries:
            factor = blocks.weights_of(grads, rows, span)
            blocks.accumulate(
                query_grad,
                self._key_rows,
                features,
                weights=factor,
                rows=rows,
                span=span,
                add=not of.has_few_keys,
            )

    def _row(self, block: _Block, number: tirx.PrimExpr, is_masked: bool) -> None:
        """Emit the weights of a row of scores, and the gradients of the scores."""
        vectors, plan, query = self._blocks.vectors, self._blocks.plan, block.first + number
        base, place = bind(number * plan.pitch), bind(self._head.row_start(query))
        inner = None if self._inner is None else bind(vectors.splat(self._inner[query]))
        panels = block.span.panels_of(number) if is_masked else const(plan.panels)
        start = None
        if self._dropout is not None:
            start = self._dropout.fill(block.factors, self._head, bind(query), block.span, panels)
        row = _Row(number, base, place, start, panels, is_masked)
        if self._has_weights:
            self._from_weights(block, row, inner)
        else:
            self._from_scores(block, row, inner)
        if is_masked:
            self._clear_rest(block, row)

    def _from_weights(self, block: _Block, row: _Row, inner: tirx.PrimExpr | None) -> None:
        """Emit a row whose weights the forward pass has saved."""
        vectors = self._blocks.vectors
        source = bind(row.place * self._of.keys)
        extent = block.span.extent_of(row.number, row.is_masked)

        def weight(k: tirx.PrimExpr, number: Extent | None) -> tirx.PrimExpr:
            return bind(vectors.load(self._sums, source + k, number))

        if inner is None:

            def term(k: tirx.PrimExpr, number: Extent | None) -> list:
                grad = vectors.load(block.grads, row.base + k)
                if block.factors is not None:
                    grad = grad * vectors.load(block.factors, row.start + k)
                return [weight(k, number) * grad]

            sums = Sums(vectors)
            sums.add_row(extent, term)
            inner = bind(vectors.splat(sums.totals()[0]))
        vectors.each(
            extent, lambda k, number: self._finish(block, row, k, weight(k, number), inner)
        )

    def _from_scores(self, block: _Block, row: _Row, inner: tirx.PrimExpr | None) -> None:
        """Emit a row from its scores, their largest one, and the logarithm of their sum."""
        blocks, vectors, plan = self._blocks, self._blocks.vectors, self._blocks.plan
        largest, logarithm = (bind(vectors.splat(self._sums[row.place * 2 + i])) for i in range(2))
        low, high = block.span.limits(row.number) if row.is_masked else (None, None)
        with b.serial(0, row.panels) as j:
            for v in range(plan.tile_vectors):
                column = bind(j * plan.width + v * vectors.lanes)
                score = vectors.load(block.weights, row.base + column)
                if row.is_masked:
                    score = blocks.only_between(score, column, low, high)
                weight = math.exp_or_0(bind(score - largest - logarithm))
                self._finish(block, row, column, weight, inner)

    def _finish(
        self,
        block: _Block,
        row: _Row,
        column: tirx.PrimExpr,
        weight: tirx.PrimExpr,
        inner: tirx.PrimExpr | None,
    ) -> None:
        """Emit the weights of a vector of columns, and the gradients of their scores."""
        vectors, at = self._blocks.vectors, row.base + column
        grad = vectors.load(block.grads, at)
        if block.factors is None:
            vectors.store(block.weights, at, weight)
        else:
            factor = bind(vectors.load(block.factors, row.start + column))
            vectors.store(block.weights, at, weight * factor)
            grad = grad * factor
        vectors.store(block.grads, at, weight * (grad - inner) * vectors.splat(self._of.scale))

    def _clear_rest(self, block: _Block, row: _Row) -> None:
        """Emit zeros for the columns that a mask leaves out."""
        vectors, plan = self._blocks.vectors, self._blocks.plan
        with b.serial(row.panels, bind(ceil_div(block.span.size, plan.width))) as j:
            for v in range(plan.tile_vectors):
                at = bind(row.base + j * plan.width + v * vectors.lanes)
                for buffer in (block.weights, block.grads):
                    vectors.store(buffer, at, vectors.splat(0))
