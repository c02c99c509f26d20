"""The gradient of attention without a matrix of scores in memory.

The weights of a block of queries and keys are computed again from the scores, the largest score,
and the logarithm of the sum of the exponentials of the scores less it. One thread computes the
gradients of a head of keys block by block. If there are few heads, the blocks of keys are divided
among the threads, then the blocks of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.row_sums import Sums, add_parts
from ._backward_pair import Common, Pair
from ._blocks import Blocks
from ._dropout import Dropout, with_generator
from ._heads import Heads
from ._pairs import blocks_for
from .forward import Forward
from .sizes import Attention, Head, with_orders

#: The most elements of the sums of a head of keys, of all threads.
_MOST_COPIED = 2**22


def attention_backward(
    of: Attention,
    shapes: Sequence[Sequence[Extent]],
    cpu: CPU,
    *,
    takes_sums: bool = False,
    exchanged: Sequence[int] = (),
    turned: Sequence[int] = (),
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of attention.

    Parameters
    ----------
    of : Attention
        The sizes and the masks.
    shapes : Sequence
        The shapes of the gradient of the result, of the result, the queries, the keys, the values,
        and of the bias if there is one.
    cpu : CPU
        The target CPU.
    takes_sums : bool
        Whether the kernel takes the numbers that the kernel of attention saves,
        :attr:`Attention.saved`. Otherwise it computes the largest scores and logarithms.
    exchanged : Sequence[int]
        The indices of the parameters that have the heads before the positions: ``(batch, heads,
        positions, features)``. The shapes are given with the positions before the heads.
    turned : Sequence[int]
        The indices of the parameters that are ``(batch, heads, features, positions)``: perhaps
        the keys and their gradient.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the tensors of ``shapes``, the forward pass's tensors, and the gradients of queries,
        keys and values. If weights are dropped, it takes the seed and the stream after the values.
    """
    names = ["output_grad", "output", "query", "key", "value"]
    shapes = [*shapes]
    if of.bias:
        names.append("bias")
    if takes_sums:
        names.append("sums")
        shapes.append(of.saved)
    names += ["query_grad", "key_grad", "value_grad"]
    shapes += shapes[2:5]
    params = with_generator(of, b.floats(names, shapes), 5)
    of, params = with_orders(of, params, exchanged, turned)

    def body(*tensors: Tensor) -> None:
        rest = list(tensors[:-3])
        sums = rest.pop() if takes_sums else None
        bias = rest.pop() if of.bias else None
        own = _Tensors(rest[:5], tensors[-3:], rest[5:], bias, sums)
        grad, _, *operands = own.inputs
        with blocks_for(of, cpu, grad, *operands) as blocks:
            _Backward(of, cpu, blocks, own).emit()

    return b.prim_func("attention_backward", params, body)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of the kernel.

    Attributes
    ----------
    inputs : Sequence[tirx.Buffer]
        The gradient of the result, the result, the queries, the keys and the values.
    results : Sequence[tirx.Buffer]
        The gradients of queries, keys and values.
    generator : Sequence[tirx.Buffer]
        The seed and the stream, if weights are dropped.
    bias : tirx.Buffer, optional
        The bias.
    sums : tirx.Buffer, optional
        The numbers that the kernel of attention saves.
    """

    inputs: Sequence[tirx.Buffer]
    results: Sequence[tirx.Buffer]
    generator: Sequence[tirx.Buffer]
    bias: tirx.Buffer | None
    sums: tirx.Buffer | None


class _Backward:
    """The emission of the gradient."""

    def __init__(self, of: Attention, cpu: CPU, blocks: Blocks, tensors: _Tensors):
        self.of, self.cpu, self.blocks, self.tensors = of, cpu, blocks, tensors
        self.dropout = Dropout.of_generator(of, self.blocks, tensors.generator)
        self.vectors = self.blocks.vectors
        self.output_grad, self.output, self.query, self.key, self.value = tensors.inputs
        self.bias, self.results = tensors.bias, tensors.results
        self.sums: tirx.Buffer = tensors.sums
        self.is_given = self.sums is not None
        self.has_weights = self.is_given and of.has_few_keys
        # The gradient of a whole row of weights, times the weights, has the sum of the products of
        # the result and its gradient.
        self.sums_weights = self.has_weights and of.keys <= of.value_features
        # The first block of queries is the only one, and needs no zeros to add to.
        self.adds = not (self.blocks.plan.has_one_block_of_queries and of.group == 1)
        self.parts = 1

    def emit(self) -> None:
        of = self.of
        self.blocks.refuse_large()
        if not self.is_given:
            self.sums = b.scratch(of.batch * of.heads * of.queries * 2)
        heads = Heads(of, self.cpu)
        self.parts = self._parts(heads)
        inner = b.parallel if heads.is_few else b.serial
        names = "output_grad", "output", "query", "key", "value"
        tensors = [*zip(names, self.tensors.inputs, strict=True)]
        if self.sums_weights:
            tensors.pop(1)
        if self.is_given:
            tensors.append(("sums", self.sums))
        grads = "query_grad", "key_grad", "value_grad"
        tensors += zip(grads, self.results, strict=True)
        with heads.loop() as i:
            heads.prefetch(i, tensors)
            self._head(bind(i // of.key_heads), bind(i % of.key_heads), inner, heads.is_few)

    def _parts(self, heads: Heads) -> int:
        """Return the number of sums of the gradients of the keys of a head, and of its values: one
        for each thread, if all work on a head, these can be added in little time, and each gets
        some blocks of queries; otherwise 1.
        """
        of, cores = self.of, self.cpu.cores
        if not (heads.is_few and isinstance(of.queries, int) and isinstance(of.keys, int)):
            return 1
        number = ceil_div(of.queries, self.blocks.plan.rows) * of.group
        size = of.keys * sum(map(self.blocks.plan.padded, (of.features, of.value_features)))
        return cores if number >= cores and size * cores <= _MOST_COPIED else 1

    def _head(
        self, batch: tirx.PrimExpr, key_head: tirx.PrimExpr, loop: Callable, is_divided: bool
    ) -> None:
        """Emit the gradients of a head of keys, and of the queries of all heads that share it."""
        of, blocks = self.of, self.blocks
        head = Head(of, batch, key_head)
        keys = head.rows("key", self.key)
        values = self.value, bind(head.start("value")), head.step("value")
        packed = (
            None
            if self.has_weights
            else blocks.copies.pack_panels(keys, of.keys, of.features, loop, of.scale),
            blocks.copies.pack_panels(values, of.keys, of.value_features, loop),
            blocks.copies.rows_of(keys, of.keys, of.features, loop),
        )
        _, key_grad, value_grad = self.results
        targets = [
            head.rows("key_grad", key_grad),
            (value_grad, bind(head.start("value_grad")), head.step("value_grad")),
        ]
        extents = of.features, of.value_features
        totals = [self._zeros(*each, loop) for each in zip(targets, extents, strict=True)]
        with b.serial(0, of.group) as i:
            own = Head(of, batch, key_head, bind(key_head * of.group + i))
            self._queries(own, i, packed, totals=totals, loop=loop, is_divided=is_divided)
        for total, target, features in zip(totals, targets, extents, strict=True):
            if self.parts > 1:  # in parallel, as all threads work on the head
                buffer, _, pitch = total
                sizes = self.parts, of.keys * pitch
                add_parts(self.vectors, buffer, buffer, sizes, self.cpu.cores)
            if total is not target:
                blocks.copies.unpack_rows(total, target, of.keys, features, loop)

    def _queries(
        self,
        head: Head,
        number: tirx.PrimExpr,
        packed: tuple,
        totals: list,
        loop: Callable,
        is_divided: bool,
    ) -> None:
        """Emit the gradient of a head of queries, and its addition to the gradients of the keys and
        values.

        ``number`` is the number of the head among the heads that share a head of keys.
        """
        of, blocks = self.of, self.blocks
        source = self.query, bind(head.start("query")), head.step("query")
        query = blocks.copies.factors_of(source, of.queries, of.features, loop)
        source = self.output_grad, bind(head.start("output_grad")), head.step("output_grad")
        grad = blocks.copies.factors_of(source, of.queries, of.value_features, loop)
        blocks_of_queries = ceil_div(of.queries, blocks.plan.rows)
        if not self.is_given:
            forward = Forward(of, blocks, self.query, bias=self.bias, result=None, sums=self.sums)
            with loop(0, blocks_of_queries) as i:
                forward.block(head, (packed[0], None), bind(i * blocks.plan.rows))
        inner = None if self.sums_weights else self._inner_products(head, loop)
        target = self.results[0], bind(head.start("query_grad")), head.step("query_grad")
        query_grad = target
        if not of.has_few_keys:
            size = of.queries * blocks.plan.padded(of.features)
            query_grad = b.scratch(size), const(0), blocks.plan.padded(of.features)
            b.clear(query_grad[0], const(0), size)
        pair = Pair(self._common(), head, packed, (query, grad, inner), (query_grad, *totals))

        def of_keys(
            with_queries: bool,
            loop: Callable,
            pair: Pair = pair,
            part: tirx.PrimExpr | None = None,
        ) -> None:
            with loop(0, ceil_div(of.keys, blocks.plan.columns)) as j:
                blocks.each_query_block(
                    bind(j * blocks.plan.columns),
                    lambda first, rows, span: pair.emit(first, rows, span, True, with_queries),
                    part,
                    self.parts,
                )

        def of_queries() -> None:
            with loop(0, blocks_of_queries) as i:
                first = bind(i * blocks.plan.rows)
                rows = bind(tirx.min(const(blocks.plan.rows), of.queries - first))
                blocks.each_key_block(
                    first, rows, lambda span: pair.emit(first, rows, span, False, True)
                )

        if self.parts > 1:
            with loop(0, self.parts) as i:
                own = [
                    (buffer, bind(start + i * (of.keys * pitch)), pitch)
                    for buffer, start, pitch in totals
                ]
                pair = Pair(self._common(), head, packed, (query, grad, inner), (query_grad, *own))
                # The heads that share a head of keys give the first block to each thread in turn.
                of_keys(True, b.serial, pair, bind((i + number) % self.parts))
        elif is_divided:
            of_keys(False, loop)
            of_queries()
        else:
            of_keys(True, b.serial)
        if query_grad is not target:
            blocks.copies.unpack_rows(query_grad, target, of.queries, of.features, loop)

    def _common(self) -> Common:
        """Return the values that all pairs share."""
        return Common(
            of=self.of,
            blocks=self.blocks,
            dropout=self.dropout,
            bias=self.bias,
            sums=self.sums,
            has_weights=self.has_weights,
            adds=self.adds,
        )

    def _inner_products(self, head: Head, loop: Callable) -> tirx.Buffer:
        """Return the sums over the features of the products of the result and its gradient."""
        of, vectors = self.of, self.vectors
        inner = b.scratch(of.queries)
        with loop(0, of.queries) as row:
            grad = bind(head.start("output_grad", row))
            output = bind(head.start("output", row))

            def term(
                offset: tirx.PrimExpr,
                number: Extent | None,
                grad: tirx.PrimExpr = grad,
                output: tirx.PrimExpr = output,
            ) -> list:
                return [
                    vectors.load(self.output_grad, grad + offset, number)
                    * vectors.load(self.output, output + offset, number)
                ]

            sums = Sums(vectors)
            sums.add_row(of.value_features, term)
            b.store(inner, row, sums.totals()[0])
        return inner

    def _zeros(self, target: tuple, features: int, loop: Callable) -> tuple:
        """Return rows of keys of whole vectors, with zeros if others are added: rows of a
        result, or others. Of several parts, the rows of the first part come first."""
        of, pitch = self.of, self.blocks.plan.padded(features)
        if self.parts > 1:
            size = of.keys * pitch
            buffer = b.scratch(self.parts * size)
            with loop(0, self.parts) as part:
                b.clear(buffer, bind(part * size), size)
            return buffer, const(0), pitch
        if not self.blocks.copies.has_whole_vectors(target, of.keys, features):
            target = b.scratch(of.keys * pitch), const(0), pitch
        if not self.adds:
            return target
        buffer, start, step = target
        if step == pitch:
            b.clear(buffer, start, of.keys * pitch)
        else:
            with b.serial(0, of.keys) as row:
                b.clear(buffer, bind(start + row * step), features)
        return target
