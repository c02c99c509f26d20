"""Parts of the kernels of recurrent layers: packed weights, and rows that products read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, Vectors, bind, ceil_div, const
from ..language.halves import Half
from ..matmul.pairs import PairPacking, Pairs, add_products, imported, pair_at, takes_pairs
from ..matmul.panels import Early, Packing
from ..matmul.tile import multiply_add, rolled_loops, rows_up_to
from ..matmul.tiled import Tiled, TilePacking
from .plan import Factors, WeightPlan


@contextmanager
def factors_of(cpu: CPU, weight: tirx.Buffer, result: tirx.Buffer) -> Iterator[Factors]:
    """Yield the elements that the products with the weight multiply.

    If they are bfloat16, the first factor is rounded, as the result that holds it is.
    """
    if amx.takes_tiles(cpu, weight, result):
        with amx.imported():
            yield Factors.TILES
    elif takes_pairs(cpu, weight, result):
        with imported():
            yield Factors.PAIRS
    else:
        with rolled_loops():
            yield Factors.FLOATS


def _add_product(
    total: tirx.PrimExpr, scalars: tirx.PrimExpr, factors: tirx.PrimExpr
) -> tirx.PrimExpr:
    return total + scalars * factors


class Weight:
    """A packed matrix, and its products with rows of elements or of pairs of bfloat16.
    :class:`TiledWeight` multiplies tiles.

    Parameters
    ----------
    plan : WeightPlan
        The sizes and the tile.
    source : tirx.Buffer
        The buffer of the matrix, which is copied.
    """

    def __init__(self, plan: WeightPlan, source: tirx.Buffer):
        self._plan, self._vectors = plan, Vectors(plan.lanes)
        self._pairs = plan.factors is Factors.PAIRS
        wide, stretch = plan.tile[1], plan.stretch
        packing = (
            PairPacking(Pairs.of(plan.matrix), self._vectors, wide, stretch=stretch)
            if self._pairs
            else Packing(plan.matrix, self._vectors, wide, stretch=stretch, fills=True)
        )
        self._packed = Early(packing, source, const(plan.start), b.parallel).panels

    def multiply(self, left: tuple, target: tirx.Buffer, rows: tirx.PrimExpr, *, add: bool) -> None:
        """Emit the products of rows and the matrix.

        ``left`` is a buffer, the offset of the first row in it, and the stride of the rows. Rows of
        pairs have an even number of elements. ``target`` has rows of :attr:`WeightPlan.pitch`.
        """
        plan = self._plan
        if plan.is_at_once:
            self._stretch(left, target, rows, (const(0), plan.steps), add=add)
            return
        if not add:
            b.clear(target, const(0), rows * plan.pitch)
        with b.serial(0, ceil_div(plan.steps, plan.stretch)) as part:
            k0 = bind(part * plan.stretch)
            size = bind(tirx.min(const(plan.stretch), plan.steps - k0))
            self._stretch(left, target, rows, (k0, size), add=True)

    def _stretch(
        self, left: tuple, target: tirx.Buffer, rows: tirx.PrimExpr, depth: tuple, *, add: bool
    ) -> None:
        """Emit the products of a stretch of k, whose panel all strips read from the first-level
        cache."""
        (buffer, start, step), (k0, size), plan = left, depth, self._plan
        height, lanes, width = plan.tile[0], plan.lanes, plan.width
        with b.serial(0, plan.panels) as j, b.serial(0, bind(ceil_div(rows, height))) as strip:
            first, base = bind(strip * height), bind((j * plan.steps + k0) * width)
            offsets = rows_up_to(first, height, rows)
            scale = 2 if self._pairs else 1
            sources = [bind(start + (first + i) * step + scale * k0) for i in offsets]
            targets = [bind((first + i) * plan.pitch + j * width) for i in offsets]

            def value(
                i: int, k: tirx.PrimExpr, sources: list[tirx.PrimExpr] = sources
            ) -> tirx.PrimExpr:
                if self._pairs:
                    return pair_at(buffer, sources[i] + 2 * k)
                return buffer[sources[i] + k]

            multiply_add(
                self._vectors,
                plan.tile,
                size,
                value=value,
                vector=lambda k, v: self._vectors.load(self._packed, base + k * width + v * lanes),
                place=lambda i, v: (target, targets[i] + v * lanes, None),
                add=add,
                rolled=plan.is_rolled,
                multiply=add_products if self._pairs else _add_product,
            )


class TiledWeight:
    """A packed matrix of pairs, and its products with rows by tiles (AMX).

    A task has one strip of rows, which reads each panel once. The parameters are as for
    :class:`Weight`.
    """

    def __init__(self, plan: WeightPlan, source: tirx.Buffer):
        self._plan, self._vectors = plan, Vectors(plan.lanes)
        product, wide = Tiled.of(plan.matrix), plan.tile[1]
        self._packing = TilePacking(
            product, self._vectors, wide, stretch=plan.stretch, multiple=amx.STEPS
        )
        self._packed = Early(self._packing, source, const(plan.start), b.parallel).panels

    def multiply(self, left: tuple, target: tirx.Buffer, rows: tirx.PrimExpr, *, add: bool) -> None:
        """Emit the products of rows and the matrix, as :meth:`Weight.multiply` does. Rows have
        finite elements to the end of their last tile."""
        (buffer, start, step), plan, width = left, self._plan, self._plan.width
        sums = amx.scratch()
        with amx.tiles(rows), b.serial(0, plan.panels) as j:
            panel = self._packed, bind(j * (plan.steps * width)), const(4 * width)
            steps, numbers = plan.steps // amx.STEPS, self._packing.vectors_in(j)
            amx.clear(sums, rows)
            amx.add(
                sums,
                (buffer, start, const(2 * step)),
                panel,
                steps=steps,
                rows=rows,
                vectors=numbers,
            )
            amx.store(sums, rows)
            with b.serial(0, rows) as i:
                to = bind(i * plan.pitch + j * width)
                for v in range(plan.tile[1]):
                    at = bind(to + v * plan.lanes)
                    total = self._vectors.load(sums, i * amx.COLUMNS + v * plan.lanes)
                    if add:
                        total = total + self._vectors.load(target, at)
                    self._vectors.store(target, at, bind(total))


class Rows:
    """Rows of the sequences of a task, which a product reads.

    Parameters
    ----------
    vectors : Vectors
        The vectors.
    count, size : int
        The number of rows, and of their elements.
    factors : Factors
        The elements that the product reads.
    exact : bool
        Whether the elements are also read in float32.
    """

    def __init__(self, vectors: Vectors, count: int, size: int, factors: Factors, *, exact: bool):
        self._vectors, self._size, self.pitch = vectors, size, factors.pitch(size)
        halves = factors.are_halves
        self._exact = b.scratch(count * self.pitch) if exact or not halves else None
        self.factor = self._exact
        if halves:
            bits = b.scratch(count * self.pitch, "uint16")
            # The rest of tiles or pairs.
            if size % (factors.line if factors is Factors.TILES else 2):
                b.clear(bits, const(0), count * self.pitch)
            self.factor = Half(bits, count * self.pitch, "bfloat16")

    def begin(self, source: tirx.Buffer, start: tirx.PrimExpr, rows: tirx.PrimExpr) -> None:
        """Emit the copy of rows."""
        targets = {id(rows): rows for rows in (self._exact, self.factor) if rows is not None}
        with b.serial(0, rows) as row:
            at, place = bind(row * self.pitch), bind(start + row * self._size)
            for target in targets.values():
                b.copy(target, at, source, place, const(self._size))

    def load(
        self, row: tirx.PrimExpr, offset: tirx.PrimExpr, number: Extent | None
    ) -> tirx.PrimExpr:
        """Return a vector of a row, in float32."""
        return self._vectors.load(self._exact, bind(row * self.pitch + offset), number)

    def store(
        self, row: tirx.PrimExpr, offset: tirx.PrimExpr, value: tirx.PrimExpr, number: Extent | None
    ) -> None:
        """Emit the store of a vector to a row."""
        if self._exact is not None:
            self._vectors.store(self._exact, bind(row * self.pitch + offset), value, number)
        if self.factor is not self._exact:
            self._vectors.store(self.factor, bind(row * self.pitch + offset), value, number)

    def left(self) -> tuple:
        """Return the first factor of a product."""
        return self.factor, const(0), self.pitch
