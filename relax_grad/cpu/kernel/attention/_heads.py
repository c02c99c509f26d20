"""The order of the work of attention: heads, and the blocks of their queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import bind, ceil_div
from ..language.halves import Half
from ..language.stealing import shared
from .plan import attention_plan
from .sizes import Attention, Head

#: The elements of a page of memory, of a line of the caches, and of a tensor that is too large for
#: the near ones.
_PAGE, _LINE, _FAR = 1024, 16, 2**15


class Heads:
    """The order of the work: each head of keys by one thread, or, if these are few, its blocks by
    all threads."""

    def __init__(self, of: Attention, cpu: CPU):
        self.of, self.plan, self._threads = of, attention_plan(of, cpu), cpu.cores
        heads = of.batch * of.key_heads
        self.number = heads
        # A thread gets whole heads only if all get about as many.
        self.is_few = isinstance(heads, int) and heads % cpu.cores != 0 and heads < 4 * cpu.cores

    def prefetch(self, index: tirx.PrimExpr, tensors: Sequence[tuple[str, tirx.Buffer]]) -> None:
        """Emit prefetches of the rows of the head of keys after an index, if they are at most a
        page, beyond which the processor does not prefetch, and come from a distant cache.

        ``tensors`` are the names and the buffers.
        """
        of = self.of
        if self.is_few or of.group > 1 or not of.has_few_keys or not isinstance(of.queries, int):
            return
        size = max(of.queries, of.keys) * max(of.features, of.value_features)
        if size > _PAGE or (isinstance(self.number, int) and self.number * size < _FAR):
            return
        following = bind(index + 1)
        key_head = bind(following % of.key_heads)
        head = Head(of, bind(following // of.key_heads), key_head, key_head)
        for name, buffer in tensors:
            if isinstance(buffer, Half):
                continue
            start, extent, step, features = head.extents(name)
            start = bind(start)
            with b.serial(0, extent) as row:
                for column in range(0, features, _LINE):
                    b.prefetch(buffer, start + row * step + column)

    def loop(self) -> AbstractContextManager[tirx.PrimExpr]:
        """Return the loop over the heads of keys."""
        return b.serial(0, self.number) if self.is_few else shared(self.number, self._threads)

    def each(
        self, pack: Callable, block: Callable, tensors: Sequence[tuple[str, tirx.Buffer]] = ()
    ) -> None:
        """Emit ``pack(head, loop)`` for each head of keys, then
        ``block(head, packed, first query)`` for its queries. The tensors, with their names, are
        prefetched."""
        of = self.of
        number = ceil_div(of.queries, self.plan.rows)
        with self.loop() as i:
            self.prefetch(i, tensors)
            batch, key_head = bind(i // of.key_heads), bind(i % of.key_heads)
            packed = pack(Head(of, batch, key_head), b.parallel if self.is_few else b.serial)
            tasks = of.group * number
            inner = shared(tasks, self._threads) if self.is_few else b.serial(0, tasks)
            with inner as task:
                own = bind(key_head * of.group + task // number)
                first = bind(task % number * self.plan.rows)
                block(Head(of, batch, key_head, own), packed, first)
