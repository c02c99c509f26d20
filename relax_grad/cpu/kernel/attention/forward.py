"""Attention without a matrix of scores in memory.

A block of queries meets the keys block by block. The softmax over all keys is computed online: each
block rescales the running sums to the running maximum of the scores. Blocks that the masks exclude
are skipped. This is the scheme of Dao et al., "FlashAttention: Fast and Memory-Efficient Exact
Attention with IO-Awareness" (2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language import functions as math
from ..language.builder import Accumulators, Extent, bind, const
from ..language.halves import Tensor
from ._blocks import LOWEST, Blocks
from ._copies import Panels
from ._dropout import Dropout, with_generator
from ._heads import Heads
from ._pairs import blocks_for
from ._spans import Span
from .sizes import Attention, Head, with_orders


def attention(
    of: Attention,
    shapes: Sequence[Sequence[Extent]],
    cpu: CPU,
    *,
    saves_sums: bool = False,
    exchanged: Sequence[int] = (),
    turned: Sequence[int] = (),
) -> tirx.PrimFunc:
    """Return the kernel of attention.

    Parameters
    ----------
    of : Attention
        The sizes and the masks.
    shapes : Sequence
        The shapes of the queries, the keys, the values, the bias if there is one, and of the
        result.
    cpu : CPU
        The target CPU.
    saves_sums : bool
        Whether the kernel also returns numbers for the gradient, :attr:`Attention.saved`. The sum
        of the largest score and the logarithm would lose the logarithm beside a score such as -1e9,
        of a query whose keys are all masked by a finite number. They are 0 and infinity for a query
        without keys, so that all weights computed from them are 0. Weights are saved as far as a
        causal mask admits them, in whole panels.
    exchanged : Sequence[int]
        The indices of the parameters that have the heads before the positions: ``(batch, heads,
        positions, features)``. The shapes are given with the positions before the heads.
    turned : Sequence[int]
        The indices of the parameters that are ``(batch, heads, features, positions)``: perhaps
        the keys.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the tensors of ``shapes``, and the saved numbers. If weights are dropped, it takes
        the seed and the stream after the values.
    """
    names = ["query", "key", "value", *(["bias"] if of.bias else []), "result"]
    shapes = [*shapes]
    if saves_sums:
        names.append("sums")
        shapes.append(of.saved)
    params = with_generator(of, b.floats(names, shapes), 3)
    of, params = with_orders(of, params, exchanged, turned)

    def body(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> None:
        rest = [*others]
        generator = [rest.pop(0), rest.pop(0)] if of.rate is not None else []
        bias = rest.pop(0) if of.bias else None
        result, *sums = rest
        with blocks_for(of, cpu, query, key, value) as blocks:
            saved = sums[0] if sums else None
            forward = Forward(
                of, blocks, query, bias=bias, result=result, sums=saved, generator=generator
            )
            blocks.refuse_large()
            Heads(of, cpu).each(
                lambda head, loop: forward.packed(head, key, value, loop),
                forward.block,
                [("query", query), ("key", key), ("value", value), ("result", result)],
            )

    return b.prim_func("attention", params, body)


class Forward:
    """The emission of the forward computation.

    Parameters
    ----------
    of : Attention
        The sizes and the masks.
    blocks : Blocks
        The blocks.
    query, bias : tirx.Buffer
        The queries, and the bias or None.
    result, sums : tirx.Buffer or None
        The results, of which either may be left out.
    generator : Sequence[tirx.Buffer]
        The seed and the stream, if weights are dropped.
    """

    def __init__(
        self,
        of: Attention,
        blocks: Blocks,
        query: tirx.Buffer,
        bias: tirx.Buffer | None,
        result: tirx.Buffer | None,
        sums: tirx.Buffer | None,
        generator: Sequence[tirx.Buffer] = (),
    ):
        self.of, self.blocks = of, blocks
        self.dropout = Dropout.of_generator(of, self.blocks, generator)
        self.vectors = self.blocks.vectors
        self.query, self.bias, self.result, self.sums = query, bias, result, sums

    def packed(self, head: Head, key: tirx.Buffer, value: tirx.Buffer, loop: Callable) -> tuple:
        """Return the keys and values of a head: copies of the keys in panels, with the scale, and
        the values in rows of whole vectors."""
        of, blocks = self.of, self.blocks
        keys = head.rows("key", key)
        values = value, head.start("value"), head.step("value")
        return (
            blocks.copies.pack_panels(keys, of.keys, of.features, loop, of.scale),
            blocks.copies.rows_of(values, of.keys, of.value_features, loop),
        )

    def block(self, head: Head, packed: tuple, first: tirx.PrimExpr) -> None:
        """Emit the attention of a block of queries from the first one on."""
        of, blocks, vectors = self.of, self.blocks, self.vectors
        keys, values = packed
        rows = bind(tirx.min(const(blocks.plan.rows), of.queries - first))
        source = self.query, bind(head.start("query", first)), head.step("query")
        query = blocks.copies.queries_of(source, rows, of.features)
        scores = b.scratch(blocks.plan.rows * blocks.plan.pitch)
        factors = self.dropout.scratch() if self.dropout else None
        if of.has_few_keys and self.result is not None:
            self._of_few_keys(
                head, packed, first, rows=rows, query=query, scores=scores, factors=factors
            )
            return
        total = None
        if self.result is not None:
            pitch = blocks.plan.padded(of.value_features)
            total = b.scratch(blocks.plan.rows * pitch)
            b.clear(total, const(0), rows * pitch)
        largest, sums = b.scratch(blocks.plan.rows), b.scratch(blocks.plan.rows * vectors.lanes)
        with b.serial(0, rows) as row:
            b.store(largest, row, tirx.const(LOWEST, "float32"))
            vectors.store(sums, row * vectors.lanes, vectors.splat(0))

        def key_block(span: Span) -> None:
            self._scores(head, query, keys, scores=scores, rows=rows, span=span)

            def weights(is_masked: bool) -> None:
                with b.serial(0, rows) as row:
                    self._row(
                        row,
                        scores,
                        total,
                        largest=largest,
                        sums=sums,
                        span=span,
                        is_masked=is_masked,
                    )
                    if self.dropout is not None:
                        self._drop(
                            self.dropout,
                            head,
                            row,
                            scores=scores,
                            factors=factors,
                            span=span,
                            is_masked=is_masked,
                        )

            b.either(span.is_whole(rows), lambda: weights(False), lambda: weights(True))
            if total is not None:
                target = total, const(0), blocks.plan.padded(of.value_features)
                factor = blocks.weights_of(scores, rows, span)
                blocks.accumulate(
                    target, values, of.value_features, weights=factor, rows=rows, span=span
                )

        blocks.each_key_block(first, rows, key_block)
        with b.serial(0, rows) as row:
            self._finish(head, first, row, total=total, largest=largest, sums=sums)

    def _of_few_keys(
        self,
        head: Head,
        packed: tuple,
        first: tirx.PrimExpr,
        rows: tirx.PrimExpr,
        query: tuple[tirx.Buffer, tirx.PrimExpr, int],
        scores: tirx.Buffer,
        factors: tirx.Buffer | None,
    ) -> None:
        """Emit the attention of a block of queries where one block has all keys."""
        of, blocks = self.of, self.blocks
        keys, values = packed
        span = Span(blocks.plan, first, rows, const(0))
        shares = b.scratch(blocks.plan.rows)
        self._scores(head, query, keys, scores=scores, rows=rows, span=span)

        def weights(is_masked: bool) -> None:
            with b.serial(0, rows) as row:
                self._whole_row(head, row, scores, shares=shares, span=span, is_masked=is_masked)
                if self.dropout is not None:
                    self._drop(
                        self.dropout,
                        head,
                        row,
                        scores=scores,
                        factors=factors,
                        span=span,
                        is_masked=is_masked,
                    )

        b.either(span.is_whole(rows), lambda: weights(False), lambda: weights(True))
        target = self.result, bind(head.start("result", first)), head.step("result")
        factor = blocks.weights_of(scores, rows, span)
        blocks.accumulate(
            target,
            values,
            of.value_features,
            weights=factor,
            rows=rows,
            span=span,
            add=False,
            shares=shares,
        )

    def _scores(
        self,
        head: Head,
        query: tuple,
        keys: Panels,
        scores: tirx.Buffer,
        rows: tirx.PrimExpr,
        span: Span,
    ) -> None:
        """Emit the scores of a block, with their bias."""
        self.blocks.scores(query, keys, self.of.features, scores=scores, rows=rows, span=span)
        if self.bias is not None:
            self.blocks.add_bias(self.bias, head, scores, rows, span)

    def _whole_row(
        self,
        head: Head,
        row: tirx.PrimExpr,
        scores: tirx.Buffer,
        shares: tirx.Buffer,
        span: Span,
        is_masked: bool,
    ) -> None:
        """Emit the exponentials of a row of all scores, and one over their sum; also the weights
        for the gradient, if it takes them.

        The exponentials themselves are the factors of the values: where these are rounded, the
        largest one, 1, is exact.
        """
        vectors, blocks = self.vectors, self.blocks
        base = bind(row * blocks.plan.pitch)
        panels = span.panels_of(row) if is_masked else const(blocks.plan.panels)
        top = self._top(row, scores, span, panels, is_masked)
        shift = bind(vectors.splat(tirx.max(tirx.const(LOWEST, "float32"), top)))
        parts = self._exponentials(base, scores, panels, shift)
        total = parts[0]
        for v in range(1, blocks.plan.tile_vectors):
            total = total + parts[v]
        share = self._share(bind(vectors.sum(bind(total))))
        b.store(shares, row, share)
        if self.sums is None:
            return
        factor = bind(vectors.splat(share))
        target = bind(head.row_start(span.query(row)) * self.of.keys)

        def part(offset: tirx.PrimExpr, number: Extent | None) -> None:
            weight = vectors.load(scores, base + offset) * factor
            vectors.store(self.sums, target + offset, weight, number)

        vectors.each(span.extent_of(row, is_masked), part)

    def _top(
        self,
        row: tirx.PrimExpr,
        scores: tirx.Buffer,
        span: Span,
        panels: tirx.PrimExpr,
        is_masked: bool,
    ) -> tirx.PrimExpr:
        """Emit minus infinity for the masked scores of a row, and return the largest
        one."""
        vectors, blocks = self.vectors, self.blocks
        lanes, wide = vectors.lanes, blocks.plan.tile_vectors
        base = bind(row * blocks.plan.pitch)
        tops = Accumulators(vectors, wide)
        for v in range(wide):
            tops[v] = vectors.splat(float("-inf"))
        if is_masked:
            low, high = span.limits(row)
        with b.serial(0, panels) as j:
            for v in range(wide):
                at = bind(base + j * blocks.plan.width + v * lanes)
                score = vectors.load(scores, at)
                if is_masked:
                    score = bind(
                        blocks.only_between(score, j * blocks.plan.width + v * lanes, low, high)
                    )
                    vectors.store(scores, at, score)
                tops[v] = tirx.max(tops[v], score)
        top = tops[0]
        for v in range(1, wide):
            top = tirx.max(top, tops[v])
        return vectors.fold(bind(top), tirx.max)

    def _exponentials(
        self, base: tirx.PrimExpr, scores: tirx.Buffer, panels: tirx.PrimExpr, shift: tirx.PrimExpr
    ) -> Accumulators:
        """Emit the exponentials of scores less a number, and return their sums."""
        vectors, blocks = self.vectors, self.blocks
        wide = blocks.plan.tile_vectors
        parts = Accumulators(vectors, wide)
        for v in range(wide):
            parts[v] = vectors.splat(0)
        with b.serial(0, panels) as j:
            for v in range(wide):
                at = bind(base + j * blocks.plan.width + v * vectors.lanes)
                weight = math.exp_or_0(bind(vectors.load(scores, at) - shift))
                vectors.store(scores, at, weight)
                parts[v] = parts[v] + weight
        return parts

    def _row(
        self,
        row: tirx.PrimExpr,
        scores: tirx.Buffer,
        total: tirx.Buffer,
        largest: tirx.Buffer,
        sums: tirx.Buffer,
        span: Span,
        is_masked: bool,
    ) -> None:
        """Emit the weights of a row of scores, and rescale the running sums."""
        vectors, blocks = self.vectors, self.blocks
        lanes, wide = vectors.lanes, blocks.plan.tile_vectors
        base = bind(row * blocks.plan.pitch)
        panels = span.panels_of(row) if is_masked else const(blocks.plan.panels)
        top = self._top(row, scores, span, panels, is_masked)
        before = bind(largest[row])
        now = bind(tirx.max(before, top))
        b.store(largest, row, now)
        shift = bind(vectors.splat(now))
        parts = self._exponentials(base, scores, panels, shift)
        factor = bind(math.exp_or_0(bind(vectors.splat(before) - shift)))
        share = vectors.load(sums, row * lanes) * factor
        for v in range(wide):
            share = share + parts[v]
        vectors.store(sums, row * lanes, share)
        if total is None:
            return
        with b.when(tirx.NE(before, now)):
            pitch = blocks.plan.padded(self.of.value_features)
            with b.serial(0, pitch // lanes) as v:
                at = bind(row * pitch + v * lanes)
                vectors.store(total, at, vectors.load(total, at) * factor)

    def _share(self, total: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return one over the sum of the weights of a row, or 0 for a row without keys."""
        zero, one = (tirx.const(value, "float32") for value in (0.0, 1.0))
        return bind(tirx.Select(tirx.EQ(total, zero), zero, one / total))

    def _drop(
        self,
        dropout: Dropout,
        head: Head,
        row: tirx.PrimExpr,
        scores: tirx.Buffer,
        factors: tirx.Buffer,
        span: Span,
        is_masked: bool,
    ) -> None:
        """Emit the dropout of a row of weights, after their sum is known."""
        vectors, blocks = self.vectors, self.blocks
        panels = span.panels_of(row) if is_masked else const(blocks.plan.panels)
        start = dropout.fill(factors, head, span.query(row), span, panels)
        base = bind(row * blocks.plan.pitch)
        with b.serial(0, panels * blocks.plan.tile_vectors) as j:
            at = bind(j * vectors.lanes)
            factor = vectors.load(factors, start + at)
            vectors.store(scores, base + at, vectors.load(scores, base + at) * factor)

    def _finish(
        self,
        head: Head,
        first: tirx.PrimExpr,
        row: tirx.PrimExpr,
        total: tirx.Buffer,
        largest: tirx.Buffer,
        sums: tirx.Buffer,
    ) -> None:
        """Emit the division of a row of the result by the sum of its weights."""
        of, vectors, zero = self.of, self.vectors, tirx.const(0.0, "float32")
        total_weight = bind(vectors.sum(bind(vectors.load(sums, row * vectors.lanes))))
        if total is not None:
            splat = bind(vectors.splat(self._share(total_weight)))
            source = bind(row * self.blocks.plan.padded(of.value_features))
            target = bind(head.start("result", first + row))

            def part(offset: tirx.PrimExpr, number: Extent | None) -> None:
                value = vectors.load(total, source + offset) * splat
                vectors.store(self.result, target + offset, value, number)

            vectors.each(of.value_features, part)
        if self.sums is not None:
            at = bind(head.row_start(first + row) * 2)
            logarithm = math.log_of_normal(total_weight)
            infinite = tirx.const(float("inf"), "float32")
            is_empty = tirx.EQ(total_weight, zero)
            b.store(self.sums, at, tirx.Select(is_empty, zero, largest[row]))
            b.store(self.sums, at + 1, tirx.Select(is_empty, infinite, logarithm))
