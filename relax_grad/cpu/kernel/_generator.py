"""The generator of matrix products whose second factor is packed into panels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from tvm import tirx

from ..target import CPU
from . import _tasks
from . import builder as b
from ._factor import Factor
from ._pairs import PairPacking, Pairs, add_products
from ._panels import Early, Late, Packed, Packing, Whole
from ._product import ROUND, Bias, Matmul, is_one, steps_ahead_of_copy, writes_rows
from ._stealing import Stealing, shared
from ._sums import add_parts
from ._tile import (
    Ahead,
    equal_height,
    lines_of,
    multiply_add,
    product_tile,
    rows_up_to,
)
from .builder import Extent, Vectors, as_expr, bind, ceil_div, const
from .halves import Half

#: The strips of a task between which the next panel is prefetched; fewer do not hide its latency.
_STRIPS_OF_PREFETCH = 16

#: The steps of k below which the rounds of a sum have equal steps, and none is left.
_FEW_STEPS = 16

#: The share of a product from which its tiles have rounds of several steps. With one step in a
#: round, rare tiles have less code: GPT's products compile in 0.82 of the time, and run as fast
#: within 1 %.
_LEAST_SHARE = 0.2

#: The bytes of C from which its prefetches are spread: less stays in a second-level cache.
_BYTES_OF_SPREAD = 512 * 1024

#: The nanoseconds of a product of a batch below which claiming it takes a noticeable part of them.
_SHORT_NS = 500


class Generator:
    """A generator of products whose second factor is packed into panels.

    Parameters
    ----------
    product : Matmul
        The products.
    cpu : CPU
        The target CPU.
    bias : Bias, optional
        The numbers that are added to the columns of C.
    divides_depth : bool
        Whether parts of k may be summed apart.
    """

    #: Whether C is stored.
    is_stored = True

    #: Whether threads may take panels from each other.
    may_steal = True

    def __init__(
        self,
        product: Matmul,
        cpu: CPU,
        bias: Bias | None = None,
        *,
        divides_depth: bool = False,
    ):
        self.p, self.cpu, self.bias = product, cpu, bias
        self.vectors = Vectors(cpu.lanes)
        #: Whether tasks compute strip by strip, and pack all panels that they read before.
        self.writes_rows = self.is_stored and writes_rows(product, cpu)
        most_rows, self.tile_vectors = product_tile(cpu, product, is_stored=self.is_stored)
        self.tile_rows = equal_height(product.rows, most_rows)
        tile = (self.tile_rows, self.tile_vectors * cpu.lanes)
        parts = _tasks.parts_of_depth(product, cpu, tile) if divides_depth else 1
        self.packing = self.packing_of(parts)
        self.width, self.panels = self.packing.width, self.packing.panels
        #: The steps of k in each part but the last one, and the parts.
        self.part, self.parts = product.depth, 1
        if parts > 1:
            stretch = self.packing.stretch
            self.part = stretch * ceil_div(ceil_div(product.depth, stretch), parts)
            self.parts = ceil_div(product.depth, self.part)
        self.strips = ceil_div(product.rows, self.tile_rows)
        self.largest, self._copied = _tasks.limits(
            cpu, tile, product.depth, writes_rows=self.writes_rows
        )
        #: Whether each task packs the panels of B that it reads.
        self.packs_late = is_one(product.batch) or not product.shared_b
        c_bytes = 4 * product.rows * product.columns
        #: Whether tiles spread their prefetches over their steps, instead of beginning with them.
        is_small = isinstance(c_bytes, int) and c_bytes < _BYTES_OF_SPREAD
        self.spreads = cpu.intel and not (is_small or self.writes_rows)
        #: Whether the sizes of tasks are known.
        self.is_divided = isinstance(self.strips, int) and isinstance(self.panels, int)
        #: The parts that threads take from each other, or None.
        self.shares = self._shares(tile)
        if self.is_divided and self.shares is None:
            most = self.blocks()
            by_tasks = _tasks.packs_by_tasks(self.strips, most, tile, product.depth)
            again = _tasks.packs_again(product, self.strips, most, cpu.cores)
            self.packs_late &= by_tasks and (self.writes_rows or not again)

    def _shares(self, tile: tuple[int, int]) -> _tasks.Shares | None:
        is_single = self.is_divided and is_one(self.p.batch) and isinstance(self.p.depth, int)
        if not (self.may_steal and self.is_stored and is_single):
            return None
        if self.parts > 1 or self.writes_rows:
            return None
        most = _tasks.most_panels_of(self.cpu, tile[1], self.packing.stretch)
        sizes = self.strips, self.panels, self.largest, self.cpu.cores, tile
        return _tasks.shares_of(*sizes, most)

    def packing_of(self, parts: int) -> Packing:
        """Return the packing of B, for some parts of k."""
        is_short = not self.cpu.before_icelake
        ahead = steps_ahead_of_copy(self.cpu, self.p.columns, self.p.depth)
        return Packing(
            self.p, self.vectors, self.tile_vectors, parts=parts, is_short=is_short, ahead=ahead
        )

    def tasks(self) -> tuple[Extent, Extent]:
        """Return the number of tasks that the strips are divided among, and that the panels are.

        Where threads take parts from each other, a task has a block of strips and one of panels:
        those that the other factor stays in a cache for, and what a thread takes, if these are
        strips, or the panels that it begins with.
        """
        if self.shares is not None:
            rounds = self.shares.rounds
            return (
                (self.shares.items, rounds) if self.shares.of_strips else (rounds, self.cpu.cores)
            )
        tile, cores = (self.tile_rows, self.width), ceil_div(self.cpu.cores, self.parts)
        return _tasks.divide(self.strips, self.panels, self.largest, cores, tile, self._copied)

    def blocks(self) -> tuple[Extent, Extent]:
        """Return the most strips and panels of a task."""
        return _tasks.largest_of((self.strips, self.panels), self.tasks())

    def emit(self, a: tirx.Buffer, bb: tirx.Buffer, c: tirx.Buffer) -> None:
        """Emit all products: each by one thread, or one after the other if they are fewer than
        threads.

        A shared B is packed once.
        """
        p = self.p
        if self.parts > 1:
            self.emit_single(a, self._late(bb, const(0)), c)
            return
        is_few = isinstance(p.batch, int) and p.batch < max(2, self.cpu.cores)
        outer, inner = (b.serial, self._loop) if is_few else (self._loop, b.serial)
        if self.packs_late:
            with outer(0, p.batch) as i:
                a0, b0, c0 = map(bind, p.starts(i))
                self._multiply(a, a0, self._late(bb, b0), c, c0, inner)
            return
        shared = p.shared_b or is_one(p.batch)
        panels = self._early(bb, const(0), b.parallel) if shared else None
        with outer(0, p.batch) as i:
            a0, b0, c0 = map(bind, p.starts(i))
            packed = self._early(bb, b0, inner) if panels is None else panels
            self._multiply(a, a0, packed, c, c0, inner)

    def _early(self, bb: tirx.Buffer, b0, loop: Callable) -> Early:
        return Early(self.packing, bb, b0, loop, prefetch=self.prefetches)

    def _late(self, bb: tirx.Buffer, b0) -> Late | Whole:
        if self.writes_rows or (self.shares is not None and self.shares.of_strips):
            return Whole(self.packing, bb, b0, self.blocks()[1])
        is_single = self.shares is not None
        return Late(self.packing, bb, b0, prefetch=self.prefetches, is_single=is_single)

    def _loop(self, start: int, stop: Extent) -> AbstractContextManager[tirx.PrimExpr]:
        """Return a parallel loop, whose iterations threads take from each other unless these are
        short: whole products, or tasks of one."""
        if replace(self.p, batch=1).nanoseconds(self.cpu) < _SHORT_NS:
            return b.parallel(start, stop)
        return shared(stop - start, self.cpu.cores)

    @property
    def prefetches(self) -> bool:
        """Whether tasks prefetch the next panel."""
        strips, _ = self.blocks()
        return not isinstance(strips, int) or strips >= _STRIPS_OF_PREFETCH

    def emit_single(self, a: tirx.Buffer, panels: Packed | Late | Whole, c: tirx.Buffer) -> None:
        """Emit a single product, whose panels other products may read too."""
        if self.parts == 1:
            self._multiply(a, const(0), panels, c, const(0), self._loop)
            return
        size = self.p.rows * self.p.columns
        sums = b.scratch(self.parts * size)
        self._multiply(a, const(0), panels, sums, const(0), self._loop)
        add_parts(self.vectors, sums, c, (self.parts, size), self.cpu.cores)

    def factor(self, a: tirx.Buffer | Half, size: tuple[int, int]) -> Factor:
        """Return the reader of A for the rows of a strip and the strips of a task."""
        # A single float16 takes long to widen; a copy of a task is widened in vectors.
        is_widened = isinstance(a, Half) and a.dtype == "float16"
        return Factor.of(self.p, self.vectors, size, self.cpu, copies=is_widened)

    # Multiplying

    #: Adds a product of vectors to a sum.
    multiply: Callable = staticmethod(lambda total, a, b: total + a * b)

    def _multiply(self, a, a0, panels, c, c0, loop) -> None:
        if self.shares is not None:
            self._multiply_stealing(a, a0, panels, c, c0, self.shares)
            return
        tasks_down, tasks_across = self.tasks()
        # A task's copy of A has a size that is known.
        most, _ = _tasks.largest_of((self.strips, self.panels), (tasks_down, tasks_across))
        most = most if isinstance(most, int) else self.largest[0]
        factor = self.factor(a, (self.tile_rows, most))
        blocks = tasks_down * tasks_across
        with loop(0, blocks * self.parts) as i:
            depth, task = (const(0), self.p.depth), i
            if self.parts > 1:
                part = bind(i // blocks)
                task = bind(i - part * blocks)
                c0 = bind(part * (self.p.rows * self.p.columns))
                start = bind(part * self.part)
                depth = (start, bind(tirx.min(const(self.part), self.p.depth - start)))
            down = b.computed(b.quotient(task, tasks_across))
            across = b.computed(task - down * tasks_across)
            strips = _tasks.range_of(down, tasks_down, self.strips)
            columns = _tasks.range_of(across, tasks_across, self.panels)
            place, late = factor.place(), panels.place()

            def block(k0, size, first) -> None:
                panels.fill(late, columns, (k0, size))
                read = factor.reader(a, a0, place, strips, (k0, size))
                self._block(read, (panels, late), c, c0, strips, columns, (k0, size, first))

            self._depths(*depth, block)

    def _multiply_stealing(self, a, a0, panels, c, c0, shares: _tasks.Shares) -> None:
        """Emit a product whose threads take panels from each other, for a block of strips after the
        other, or blocks of strips, for a block of panels after the other; and for these a stretch
        of k after the other. Each thread copies the block that they are computed with."""
        stretch = self.packing.stretch
        stretches = ceil_div(self.p.depth, stretch)
        factor = self.factor(a, (self.tile_rows, self.blocks()[0]))
        work = Stealing(shares.rounds * stretches, shares.items, self.cpu.cores)
        with work.threads() as thread:
            place, late = factor.place(), panels.place()
            with b.serial(0, shares.rounds) as i:
                number = self.panels if shares.of_strips else self.strips
                block = _tasks.range_of(i, shares.rounds, number)

                def of_stretch(k0, size, first) -> None:
                    def prepare() -> Callable | None:
                        if shares.of_strips:
                            panels.fill(late, block, (k0, size))
                            return None
                        return factor.reader(a, a0, place, block, (k0, size))

                    def item(read: Callable | None, at, begin, end) -> None:
                        both, depth = (panels, late), (k0, size, first)
                        if read is None:
                            strips = _tasks.range_of(at, shares.items, self.strips)
                            read = factor.reader(a, a0, place, strips, (k0, size))
                            self._block(read, both, c, c0, strips, block, depth)
                        else:
                            columns = (at, at + 1)
                            self._block(read, both, c, c0, block, columns, depth, (begin, end))

                    number = b.computed(i * stretches + b.quotient(k0, stretch))
                    work.round(number, thread, prepare, item)

                self._depths(const(0), self.p.depth, of_stretch)

    def _depths(self, begin, depth: Extent, emit: Callable) -> None:
        """Emit ``emit(start, size, is_first)`` for each stretch of a part of k; the first one sets
        C, the others add to it."""
        size = self.packing.stretch
        if isinstance(self.part, int) and self.part <= size:
            emit(begin, as_expr(depth), True)
            return
        stretches = ceil_div(depth, size)
        if not isinstance(depth, int):
            # The empty sum is 0.
            stretches = stretches + tirx.Cast("int32", tirx.EQ(depth, const(0)))
        with b.serial(0, stretches) as i:
            start = bind(i * size)
            is_whole = isinstance(depth, int) and depth % size == 0
            left = const(size) if is_whole else bind(tirx.min(const(size), depth - start))
            emit(bind(begin + start), left, tirx.EQ(i, const(0)))

    def _block(self, read, panels, c, c0, strips, columns, depth, among=None) -> None:
        """Emit the tiles of a block: panel by panel, so that a stretch of a panel stays in the
        cache, or strip by strip, so that rows of C are written sequentially. The panels of a block
        may be some among those of a thread."""
        if self.writes_rows:
            self._by_strips(read, panels, c, c0, strips, columns, depth)
            return
        strips_each = self.blocks()[0] if self.is_divided else bind(strips[1] - strips[0])
        with panels[0].each(panels[1], columns, depth[:2], among) as (j, panel, ahead):

            def tiles(numbers: list) -> None:
                with b.serial(strips[0], strips[1]) as i:
                    later: Sequence[Ahead] = ()
                    if ahead is not None:
                        later = [ahead(bind(i - strips[0]), strips_each)]
                    if not self.spreads:
                        # Once, for whole and for partial strips.
                        for prefetches in later:
                            prefetches.all()
                        later = ()
                    self._strip(
                        i,
                        lambda row, offsets: self._tile(
                            read, panel, c, c0, (row, offsets), (j, numbers), (*depth, later)
                        ),
                    )

            self._whole_or_part(j, tiles)

    def _by_strips(self, read, panels, c, c0, strips, columns, depth) -> None:
        with b.serial(*strips) as i, panels[0].each(panels[1], columns, depth[:2]) as (j, panel, _):

            def tiles(numbers: list) -> None:
                self._strip(
                    i,
                    lambda row, offsets: self._tile(
                        read, panel, c, c0, (row, offsets), (j, numbers), (*depth, ())
                    ),
                )

            self._whole_or_part(j, tiles)

    def _whole_or_part(self, j, tiles: Callable) -> None:
        """Emit the tiles of a whole panel, and those of the last one, which may be partial."""
        columns, width, lanes = self.p.columns, self.width, self.vectors.lanes
        whole = [None] * self.tile_vectors
        if isinstance(columns, int):
            rest = columns % width
            part = [min(lanes, rest - at) for at in range(0, rest, lanes)]
            if rest == 0:
                tiles(whole)
            elif columns < width:
                tiles(part)
            else:
                b.either(j < self.panels - 1, lambda: tiles(whole), lambda: tiles(part))
            return
        left = bind(columns - j * width)
        part = [
            bind(tirx.max(const(0), tirx.min(const(lanes), left - at)))
            for at in range(0, width, lanes)
        ]
        b.either(left >= width, lambda: tiles(whole), lambda: tiles(part))

    def _strip(self, i, tile: Callable) -> None:
        """Emit the tile of a strip: with all rows, or with the remaining ones."""
        rows, height = self.p.rows, self.tile_rows
        if isinstance(rows, int):
            rest = rows % height
            if rest == 0:
                tile(i * height, range(height))
            elif rows < height:
                tile(i * height, range(rest))
            else:
                b.either(
                    i < self.strips - 1,
                    lambda: tile(i * height, range(height)),
                    lambda: tile(i * height, range(rest)),
                )
            return

        def parts() -> None:
            """Emit half tiles; rows beyond the last one repeat the last one."""
            half = height // 2
            with b.serial(0, ceil_div(rows - i * height, half)) as part:
                first = bind(i * height + part * half)
                tile(first, rows_up_to(first, half, rows))

        b.either((i + 1) * height <= rows, lambda: tile(i * height, range(height)), parts)

    def _tile(self, reader, panel, c, c0, rows, columns, depth) -> None:
        """Emit one tile of C over a stretch of k; ``rows`` holds the first row, and the offsets of
        all rows from it, and ``depth`` also the prefetches for later tiles."""
        (row, offsets), (j, numbers), (_, size, first, later) = rows, columns, depth
        lanes, width, bias = self.vectors.lanes, self.width, self.bias
        row = bind(row)
        start = bind(c0 + row * self.p.columns + j * width)
        if self.spreads_in(offsets, numbers):
            later = [lines_of(c, start, self.p.columns, len(offsets), width), *later]
        self._sum(
            (reader(row), offsets),
            (panel, len(numbers)),
            size,
            lambda i, v: (c, start + offsets[i] * self.p.columns + v * lanes, numbers[v]),
            add=not first if isinstance(first, bool) else tirx.Not(first),
            bias=None if bias is None else bias.vector_of(self.vectors, j * width, numbers),
            ahead=self.spread(offsets, numbers, later),
            is_rare=self._share(offsets, numbers) < _LEAST_SHARE,
        )

    def _share(self, rows: Sequence, numbers: Sequence) -> float:
        """Return the share of the tiles of some rows and vectors in the steps of a product; 1 if an
        extent is symbolic."""
        if not self.p.is_static:
            return 1.0
        whole = self.p.rows // self.tile_rows if len(rows) == self.tile_rows else 1
        vectors = ceil_div(self.p.columns, self.vectors.lanes)
        rest = ceil_div(self.p.columns % self.width, self.vectors.lanes)
        is_whole = all(number is None for number in numbers) and len(numbers) == self.tile_vectors
        of_vectors = vectors - rest if is_whole else rest
        return len(rows) * whole * of_vectors / (self.p.rows * vectors)

    def spread(self, rows: Sequence, vectors: Sequence, ahead: Sequence[Ahead]) -> Sequence[Ahead]:
        """Return the prefetches that a tile of some rows and vectors spreads over its steps; emit
        those of other tiles."""
        if self.spreads_in(rows, vectors):
            return ahead
        for prefetches in ahead:
            prefetches.all()
        return ()

    def spreads_in(self, rows: Sequence, vectors: Sequence) -> bool:
        """Tell whether a tile of some rows and vectors spreads its prefetches over its steps: few
        tiles are partial, and their code would double."""
        return self.spreads and (len(rows), len(vectors)) == (self.tile_rows, self.tile_vectors)

    def _sum(
        self,
        rows,
        columns,
        size,
        place: Callable,
        add,
        bias=None,
        ahead: Sequence[Ahead] = (),
        *,
        is_rare: bool = False,
    ) -> None:
        """Emit the sums of a tile.

        ``rows`` holds the reader of A from the first row on, and the offsets of all rows;
        ``columns`` holds the panel and the number of its vectors; ``place``, ``add``, ``bias`` and
        ``ahead`` are those of :func:`multiply_add`. A rare tile has short code.
        """
        (read, offsets), ((panels, base), number) = rows, columns
        lanes, width, depth = self.vectors.lanes, self.width, self.p.depth
        few = isinstance(depth, int) and depth < _FEW_STEPS
        unrolled = 1 if is_rare else math.gcd(depth, ROUND) if few else ROUND
        multiply_add(
            self.vectors,
            (len(offsets), number),
            size,
            lambda i, k: read(offsets[i], k),
            lambda k, v: self.vectors.load(panels, base + k * width + v * lanes),
            place,
            add=add,
            prefetch=True,
            unrolled=unrolled,
            has_rest=not isinstance(depth, int) or depth % unrolled > 0,
            multiply=self.multiply,
            bias=bias,
            ahead=ahead,
            rounds=self.packing.stretch // unrolled,
        )


class GeneratorOfPairs(Generator):
    """A generator of products of pairs of bfloat16."""

    p: Pairs
    may_steal = False  # not measured

    multiply = staticmethod(add_products)

    def packing_of(self, parts: int) -> Packing:
        return PairPacking(self.p, self.vectors, self.tile_vectors, parts=parts)

    def factor(self, a: tirx.Buffer | Half, size: tuple[int, int]) -> Factor:
        return self.p.factor(self.vectors, size)
