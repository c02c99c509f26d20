"""The generator of matrix products whose second factor is packed into panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.row_sums import add_parts
from ..language.statements import Emit
from ..language.stealing import Stealing, range_of, shared
from . import _tasks
from ._factor import READERS, Factor
from ._plans import PackedPlan
from .pairs import PairPacking, Pairs, add_products
from .panels import Early, Late, Packing, PanelSource, Whole
from .product import Bias, is_one
from .tile import Ahead, lines_of, multiply_add, rows_up_to


class Generator:
    """A generator of products whose second factor is packed into panels.

    Parameters
    ----------
    plan : PackedPlan
        The plan of the products.
    bias : Bias, optional
        The numbers that are added to the columns of C.
    """

    def __init__(self, plan: PackedPlan, bias: Bias | None = None):
        self.plan, self.p, self.bias = plan, plan.product, bias
        self.vectors = Vectors(plan.lanes)
        self.packing = self.packing_of(plan)
        self.tile_rows, self.tile_vectors, self.width = plan.height, plan.vectors, plan.width
        self.strips, self.panels, self.shares = plan.strips, plan.panels, plan.shares
        self.part, self.parts = plan.part, plan.parts

    def packing_of(self, plan: PackedPlan) -> Packing:
        """Return the packing of B."""
        return Packing(
            self.p,
            self.vectors,
            plan.vectors,
            stretch=plan.stretch,
            multiple=plan.tiles.round,
            ahead=plan.ahead_b,
        )

    def tasks(self) -> tuple[Extent, Extent]:
        """Return the number of tasks that the strips are divided among, and that the panels are.

        Those of symbolic extents are computed by the kernel.
        """
        plan = self.plan
        if plan.tasks is not None:
            return plan.tasks
        tile, cores = (plan.height, plan.width), ceil_div(plan.cores, plan.parts)
        return _tasks.divide(
            plan.strips, plan.panels, plan.largest, cores=cores, tile=tile, copied=plan.copied
        )

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
        is_few = isinstance(p.batch, int) and p.batch < max(2, self.plan.cores)
        outer, inner = (b.serial, self._loop) if is_few else (self._loop, b.serial)
        if self.plan.packs_late:
            with outer(0, p.batch) as i:
                a0, b0, c0 = map(bind, p.starts(i))
                self._multiply(a, a0, self._late(bb, b0), c=c, c0=c0, loop=inner)
            return
        shared = p.shared_b or is_one(p.batch)
        panels = self._early(bb, const(0), b.parallel) if shared else None
        with outer(0, p.batch) as i:
            a0, b0, c0 = map(bind, p.starts(i))
            packed = self._early(bb, b0, inner) if panels is None else panels
            self._multiply(a, a0, packed, c=c, c0=c0, loop=inner)

    def _early(self, bb: tirx.Buffer, b0: tirx.PrimExpr, loop: Callable) -> Early:
        return Early(self.packing, bb, b0, loop, prefetch=self._prefetches())

    def _late(self, bb: tirx.Buffer, b0: tirx.PrimExpr) -> Late | Whole:
        if self.plan.by_rows or (self.shares is not None and self.shares.of_strips):
            return Whole(self.packing, bb, b0, self.blocks()[1])
        is_single = self.shares is not None
        prefetches = self._prefetches() and not self.plan.is_near
        return Late(self.packing, bb, b0, prefetch=prefetches, is_single=is_single)

    def _loop(self, start: int, stop: Extent) -> AbstractContextManager[tirx.PrimExpr]:
        """Return a parallel loop, whose iterations threads take from each other unless these are
        short: whole products, or tasks of one."""
        if not self.plan.steals_loops:
            return b.parallel(start, stop)
        return shared(stop - start, self.plan.cores)

    def _prefetches(self) -> bool:
        """Tell whether tasks prefetch the next panel: only for symbolic extents."""
        if self.plan.prefetches is not None:
            return self.plan.prefetches
        self.blocks()  # emits their sizes once more; LLVM removes what is not read
        return True

    def emit_single(self, a: tirx.Buffer, panels: PanelSource, c: tirx.Buffer) -> None:
        """Emit a single product, whose panels other products may read too."""
        if self.parts == 1:
            self._multiply(a, const(0), panels, c=c, c0=const(0), loop=self._loop)
            return
        size = self.p.rows * self.p.columns
        sums = b.scratch(self.parts * size)
        self._multiply(a, const(0), panels, c=sums, c0=const(0), loop=self._loop)
        add_parts(self.vectors, sums, c, (self.parts, size), self.plan.cores)

    def factor(self, size: tuple[int, int]) -> Factor:
        """Return the reader of A for the rows of a strip and the strips of a task."""
        plan = self.plan
        reader = READERS[plan.reading][plan.product.transpose_a]
        depth = plan.tiles.depth
        return reader(self.p, self.vectors, size, depth=depth, ahead=plan.ahead_a)

    # Multiplying

    #: Adds a product of vectors to a sum.
    multiply: Callable = staticmethod(lambda total, a, b: total + a * b)

    def _multiply(
        self,
        a: Tensor,
        a0: tirx.PrimExpr,
        panels: PanelSource,
        c: Tensor,
        c0: tirx.PrimExpr,
        loop: Callable,
    ) -> None:
        if self.shares is not None:
            self._multiply_stealing(a, a0, panels, c=c, c0=c0, shares=self.shares)
            return
        tasks_down, tasks_across = self.tasks()
        # A task's copy of A has a size that is known.
        most, _ = _tasks.largest_of((self.strips, self.panels), (tasks_down, tasks_across))
        most = most if isinstance(most, int) else self.plan.largest[0]
        factor = self.factor((self.tile_rows, most))
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
            strips = range_of(down, tasks_down, self.strips)
            columns = range_of(across, tasks_across, self.panels)
            place, late = factor.place(), panels.place()

            def block(k0: tirx.PrimExpr, size: tirx.PrimExpr, first: bool | tirx.PrimExpr) -> None:
                panels.fill(late, columns, (k0, size))
                read = factor.reader(a, a0, place, strips, (k0, size))
                self._block(
                    read,
                    (panels, late),
                    c,
                    c0=c0,
                    strips=strips,
                    columns=columns,
                    depth=(k0, size, first),
                )

            self._depths(*depth, block)

    def _multiply_stealing(
        self,
        a: Tensor,
        a0: tirx.PrimExpr,
        panels: PanelSource,
        c: Tensor,
        c0: tirx.PrimExpr,
        shares: _tasks.Shares,
    ) -> None:
        """Emit a product whose threads take panels from each other, for a block of strips after the
        other, or blocks of strips, for a block of panels after the other; and for these a stretch
        of k after the other. Each thread copies the block that they are computed with."""
        stretch = self.packing.stretch
        stretches = ceil_div(self.p.depth, stretch)
        factor = self.factor((self.tile_rows, self.blocks()[0]))
        work = Stealing(shares.rounds * stretches, shares.items, self.plan.cores)
        with work.threads() as thread:
            place, late = factor.place(), panels.place()
            with b.serial(0, shares.rounds) as i:
                number = self.panels if shares.of_strips else self.strips
                block = range_of(i, shares.rounds, number)

                def of_stretch(
                    k0: tirx.PrimExpr, size: tirx.PrimExpr, first: tirx.PrimExpr
                ) -> None:
                    def prepare() -> Callable | None:
                        if shares.of_strips:
                            panels.fill(late, block, (k0, size))
                            return None
                        return factor.reader(a, a0, place, block, (k0, size))

                    def item(
                        read: Callable | None,
                        at: tirx.PrimExpr,
                        begin: tirx.PrimExpr,
                        end: tirx.PrimExpr,
                    ) -> None:
                        both, depth = (panels, late), (k0, size, first)
                        if read is None:
                            strips = range_of(at, shares.items, self.strips)
                            read = factor.reader(a, a0, place, strips, (k0, size))
                            self._block(
                                read, both, c, c0=c0, strips=strips, columns=block, depth=depth
                            )
                        else:
                            columns = (at, at + 1)
                            self._block(
                                read,
                                both,
                                c,
                                c0=c0,
                                strips=block,
                                columns=columns,
                                depth=depth,
                                among=(begin, end),
                            )

                    number = b.computed(i * stretches + b.quotient(k0, stretch))
                    work.round(number, thread, prepare, item)

                self._depths(const(0), self.p.depth, of_stretch)

    def _depths(self, begin: tirx.PrimExpr, depth: Extent, emit: Emit) -> None:
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

    def _block(
        self,
        read: Callable,
        panels: tuple,
        c: Tensor | None,
        c0: tirx.PrimExpr,
        strips: tuple,
        columns: tuple,
        depth: tuple,
        among: tuple[tirx.PrimExpr, tirx.PrimExpr] | None = None,
    ) -> None:
        """Emit the tiles of a block: panel by panel, so that a stretch of a panel stays in the
        cache, or strip by strip, so that rows of C are written sequentially. A block may
        have a part of the thread's panels."""
        if self.plan.by_rows:
            self._by_strips(read, panels, c, c0=c0, strips=strips, columns=columns, depth=depth)
            return
        block = self.plan.block
        strips_each = bind(strips[1] - strips[0]) if block is None else block[0]
        with panels[0].each(panels[1], columns, depth[:2], among) as (j, panel, ahead):

            def tiles(numbers: list) -> None:
                with b.serial(strips[0], strips[1]) as i:
                    later: Sequence[Ahead] = ()
                    if ahead is not None:
                        later = [ahead(bind(i - strips[0]), strips_each)]
                    if not self.plan.spreads:
                        # Once, for whole and for partial strips.
                        for prefetches in later:
                            prefetches.all()
                        later = ()
                    self._strip(
                        i,
                        lambda row, offsets: self._tile(
                            read,
                            panel,
                            c,
                            c0=c0,
                            rows=(row, offsets),
                            columns=(j, numbers),
                            depth=(*depth, later),
                        ),
                    )

            self._whole_or_part(j, tiles)

    def _by_strips(
        self,
        read: Callable,
        panels: tuple,
        c: Tensor,
        c0: tirx.PrimExpr,
        strips: tuple,
        columns: tuple,
        depth: tuple,
    ) -> None:
        with b.serial(*strips) as i, panels[0].each(panels[1], columns, depth[:2]) as (j, panel, _):

            def tiles(numbers: list) -> None:
                self._strip(
                    i,
                    lambda row, offsets: self._tile(
                        read,
                        panel,
                        c,
                        c0=c0,
                        rows=(row, offsets),
                        columns=(j, numbers),
                        depth=(*depth, ()),
                    ),
                )

            self._whole_or_part(j, tiles)

    def _whole_or_part(self, j: tirx.PrimExpr, tiles: Callable) -> None:
        """Emit the tiles of a whole panel, and of the last panel, which may be partial."""
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

    def _strip(self, i: tirx.PrimExpr, tile: Callable) -> None:
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

    def _tile(
        self,
        reader: Callable,
        panel: tuple,
        c: Tensor,
        c0: tirx.PrimExpr,
        rows: tuple,
        columns: tuple,
        depth: tuple,
    ) -> None:
        """Emit one tile of C over a stretch of k; ``rows`` holds the first row, and the offsets of
        all rows from it, and ``depth`` also the prefetches for later tiles."""
        (row, offsets), (j, numbers), (_, size, first, later) = rows, columns, depth
        lanes, width, bias = self.vectors.lanes, self.width, self.bias
        row = bind(row)
        start = bind(c0 + row * self.p.columns + j * width)
        if self.spreads_in(offsets, numbers):
            later = [lines_of(c, start, self.p.columns, len(offsets), width), *later]
        is_whole = all(number is None for number in numbers)
        self._sum(
            (reader(row), offsets),
            (panel, len(numbers)),
            size,
            lambda i, v: (c, start + offsets[i] * self.p.columns + v * lanes, numbers[v]),
            add=not first if isinstance(first, bool) else tirx.Not(first),
            bias=None if bias is None else bias.vector_of(self.vectors, j * width, numbers),
            ahead=self.spread(offsets, numbers, later),
            round_=self.plan.round_of(len(offsets), len(numbers), is_whole=is_whole),
        )

    def spread(self, rows: Sequence, vectors: Sequence, ahead: Sequence[Ahead]) -> Sequence[Ahead]:
        """Return the prefetches that a tile of some rows and vectors spreads over its steps; emit
        the prefetches of other tiles."""
        if self.spreads_in(rows, vectors):
            return ahead
        for prefetches in ahead:
            prefetches.all()
        return ()

    def spreads_in(self, rows: Sequence, vectors: Sequence) -> bool:
        """Tell whether a tile of some rows and vectors spreads its prefetches over its steps: few
        tiles are partial, and their code would double."""
        return self.plan.spreads and (len(rows), len(vectors)) == (
            self.tile_rows,
            self.tile_vectors,
        )

    def _sum(
        self,
        rows: tuple,
        columns: tuple,
        size: tirx.PrimExpr,
        place: Callable,
        add: bool | tirx.PrimExpr,
        bias: Callable | None = None,
        ahead: Sequence[Ahead] = (),
        *,
        round_: int | None = None,
    ) -> None:
        """Emit the sums of a tile.

        ``rows`` holds the reader of A from the first row on, and the offsets of all rows;
        ``columns`` holds the panel and the number of its vectors; ``place``, ``add``, ``bias`` and
        ``ahead`` are as for :func:`multiply_add`. ``round_`` is the number of steps of a round, by
        default the plan's.
        """
        (read, offsets), ((panels, base), number) = rows, columns
        lanes, width, depth = self.vectors.lanes, self.width, self.p.depth
        unrolled = round_ or self.plan.round
        multiply_add(
            self.vectors,
            (len(offsets), number),
            size,
            value=lambda i, k: read(offsets[i], k),
            vector=lambda k, v: self.vectors.load(panels, base + k * width + v * lanes),
            place=place,
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

    multiply = staticmethod(add_products)

    def packing_of(self, plan: PackedPlan) -> Packing:
        return PairPacking(
            self.p, self.vectors, plan.vectors, stretch=plan.stretch, multiple=plan.tiles.round
        )

    def factor(self, size: tuple[int, int]) -> Factor:
        return self.p.factor(self.vectors, size, self.plan.tiles.depth)
