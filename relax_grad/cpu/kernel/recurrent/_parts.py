"""Parts of the kernels of recurrent layers: packed weights, rows that products read, and tasks."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx

from ...target import CPU
from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, Vectors, bind, ceil_div, const
from ..language.extents import LINE
from ..language.halves import Half
from ..language.statements import Emit
from ..matmul.pairs import PairPacking, Pairs, add_products, imported, pair_at, takes_pairs
from ..matmul.panels import Early, Packing
from ..matmul.product import Matmul
from ..matmul.tile import equal_height, multiply_add, rolled_loops, rows_up_to
from ..matmul.tiled import ELEMENTS, Tiled, TilePacking

#: The largest number of sequences of a task.
_MOST_ROWS = 32

#: The steps of k of a stretch.
_DEPTH = 256

#: The cycles from a multiply-add to the next one of the same accumulator.
_LATENCY = 5


class Factors(enum.Enum):
    """The elements that the products with a weight multiply."""

    FLOATS = enum.auto()
    #: Pairs of bfloat16 (AVX512-BF16).
    PAIRS = enum.auto()
    #: Tiles of bfloat16 (AMX).
    TILES = enum.auto()

    @property
    def are_halves(self) -> bool:
        """Whether the elements are bfloat16."""
        return self is not Factors.FLOATS

    @property
    def line(self) -> int:
        """The elements to whole numbers of which rows are padded."""
        return ELEMENTS if self is Factors.TILES else LINE


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


def tile(rows: int, columns: int, cpu: CPU) -> tuple[int, int]:
    """Return the rows and vectors of the tile that computes a product in the fewest cycles.

    Each step of k takes half a cycle for a multiply-add and for a load. It takes no less than
    the time for which the next multiply-add of an accumulator waits.
    """
    most = 8 if cpu.registers >= 32 else 6
    # Without multiply-adds, short vectors need a register for the product.
    numbers = (2, 3) if cpu.lanes >= 8 else (2,)

    def cost(size: tuple[int, int]) -> float:
        height, vectors = size
        cycles = max(height * vectors / 2, (height + vectors) / 2, _LATENCY)
        return ceil_div(rows, height) * ceil_div(columns, vectors * cpu.lanes) * cycles

    sizes = [
        (equal_height(rows, min(most, (cpu.registers - 1 - vectors) // vectors)), vectors)
        for vectors in numbers
    ]
    return min(sizes, key=cost)


def _add_product(
    total: tirx.PrimExpr, scalars: tirx.PrimExpr, factors: tirx.PrimExpr
) -> tirx.PrimExpr:
    return total + scalars * factors


class Weight:
    """A packed matrix, ``[panel][k][width]``, padded with zeros, and its products with rows.

    Parameters
    ----------
    columns, depth : int
        The extents of the matrix.
    start : int
        Its offset in the buffer.
    is_turned : bool
        Whether the matrix is stored as ``[columns, depth]``.
    rows : int
        The largest number of rows of a product.
    pairs : bool
        Whether the products are of pairs of bfloat16. :class:`TiledWeight` multiplies tiles.
    """

    def __init__(
        self,
        cpu: CPU,
        columns: int,
        depth: int,
        is_turned: bool,
        rows: int,
        start: int = 0,
        *,
        pairs: bool,
    ):
        self._vectors, self._tile, self._pairs = Vectors(cpu.lanes), tile(rows, columns, cpu), pairs
        matrix = Matmul(1, columns, depth, transpose_b=is_turned)
        self._packing = (
            PairPacking(Pairs.of(matrix), self._vectors, self._tile[1], stretch=_DEPTH)
            if pairs
            else Packing(matrix, self._vectors, self._tile[1], stretch=_DEPTH, fills=True)
        )
        self._is_one_strip = rows <= self._tile[0]
        # A tile of three vectors in a row takes all of 16 registers.
        self._takes_all = cpu.registers < 32 and self._tile[1] == 3
        self._depth, self._width = self._packing.p.depth, self._packing.width
        self._start, self._panels = start, ceil_div(columns, self._width)
        #: The stride of the rows of a product.
        self.pitch = self._panels * self._width

    def pack(self, source: tirx.Buffer) -> None:
        """Emit the copy of the matrix."""
        self._packed = Early(self._packing, source, const(self._start), b.parallel).panels

    def multiply(self, left: tuple, target: tirx.Buffer, rows: tirx.PrimExpr, *, add: bool) -> None:
        """Emit the products of rows and the matrix.

        ``left`` is a buffer, the offset of the first row in it, and the stride of the rows. Rows of
        pairs have an even number of elements. ``target`` has rows of :attr:`pitch`.
        """
        if self._depth <= _DEPTH or self._is_one_strip:
            self._stretch(left, target, rows, (const(0), self._depth), add=add)
            return
        if not add:
            b.clear(target, const(0), rows * self.pitch)
        with b.serial(0, ceil_div(self._depth, _DEPTH)) as part:
            k0 = bind(part * _DEPTH)
            size = bind(tirx.min(const(_DEPTH), self._depth - k0))
            self._stretch(left, target, rows, (k0, size), add=True)

    def _stretch(
        self, left: tuple, target: tirx.Buffer, rows: tirx.PrimExpr, depth: tuple, *, add: bool
    ) -> None:
        """Emit the products of a stretch of k, whose panel all strips read from the first-level
        cache."""
        (buffer, start, step), (k0, size) = left, depth
        height, lanes, width = self._tile[0], self._vectors.lanes, self._width
        with b.serial(0, self._panels) as j, b.serial(0, bind(ceil_div(rows, height))) as strip:
            first, base = bind(strip * height), bind((j * self._depth + k0) * width)
            offsets = rows_up_to(first, height, rows)
            scale = 2 if self._pairs else 1
            sources = [bind(start + (first + i) * step + scale * k0) for i in offsets]
            targets = [bind((first + i) * self.pitch + j * width) for i in offsets]

            def value(
                i: int, k: tirx.PrimExpr, sources: list[tirx.PrimExpr] = sources
            ) -> tirx.PrimExpr:
                if self._pairs:
                    return pair_at(buffer, sources[i] + 2 * k)
                return buffer[sources[i] + k]

            multiply_add(
                self._vectors,
                self._tile,
                size,
                value=value,
                vector=lambda k, v: self._vectors.load(self._packed, base + k * width + v * lanes),
                place=lambda i, v: (target, targets[i] + v * lanes, None),
                add=add,
                rolled=self._takes_all,
                multiply=add_products if self._pairs else _add_product,
            )


class TiledWeight:
    """A packed matrix of pairs, and its products with rows by tiles (AMX).

    A task has one strip of rows, which reads each panel once. The parameters are as for
    :class:`Weight`.
    """

    def __init__(self, cpu: CPU, columns: int, depth: int, is_turned: bool, start: int = 0):
        self._vectors, self._start = Vectors(cpu.lanes), start
        wide = 1 if columns <= amx.LANES else 2
        product = Tiled.of(Matmul(1, columns, depth, transpose_b=is_turned))
        assert isinstance(product.depth, int)
        self._packing = TilePacking(
            product, self._vectors, wide, stretch=product.depth, multiple=amx.STEPS
        )
        self._depth, self._wide, self._width = product.depth, wide, self._packing.width
        self._panels = ceil_div(columns, self._width)
        self.pitch = self._panels * self._width

    def pack(self, source: tirx.Buffer) -> None:
        """Emit the copy of the matrix."""
        self._packed = Early(self._packing, source, const(self._start), b.parallel).panels

    def multiply(self, left: tuple, target: tirx.Buffer, rows: tirx.PrimExpr, *, add: bool) -> None:
        """Emit the products of rows and the matrix, as :meth:`Weight.multiply` does. Rows have
        finite elements to the end of their last tile."""
        (buffer, start, step), lanes, width = left, self._vectors.lanes, self._width
        sums = amx.scratch()
        with amx.tiles(rows), b.serial(0, self._panels) as j:
            panel = self._packed, bind(j * (self._depth * width)), const(4 * width)
            steps, numbers = self._depth // amx.STEPS, self._packing.vectors_in(j)
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
                to = bind(i * self.pitch + j * width)
                for v in range(self._wide):
                    at = bind(to + v * lanes)
                    total = self._vectors.load(sums, i * amx.COLUMNS + v * lanes)
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
        self._vectors, self._size, line = vectors, size, factors.line
        #: The stride of the rows: lines of cache of an odd number, so that not all rows lie in the
        #: same sets of it.
        self.pitch = (ceil_div(size, line) | 1) * line
        halves = factors.are_halves
        self._exact = b.scratch(count * self.pitch) if exact or not halves else None
        self.factor = self._exact
        if halves:
            bits = b.scratch(count * self.pitch, "uint16")
            if size % (line if factors is Factors.TILES else 2):  # the rest of tiles or pairs
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


class Tasks:
    """Blocks of sequences.

    Parameters
    ----------
    batch : int or tirx.PrimExpr
        The number of sequences.
    size : int
        The number of units.

    Attributes
    ----------
    rows : int
        The number of sequences of a task.
    """

    def __init__(self, batch: Extent, size: int, cpu: CPU):
        self._batch, self._size, self._vectors = batch, size, Vectors(cpu.lanes)
        self.rows = 16 if cpu.registers >= 32 else 12
        if isinstance(batch, int):
            cores = max(1, cpu.cores)
            self.rows = ceil_div(batch, cores * ceil_div(batch, cores * _MOST_ROWS))

    def each(self, emit: Emit) -> None:
        """Emit ``emit(first, rows)`` for each block."""
        with b.parallel(0, ceil_div(self._batch, self.rows)) as task:
            first = bind(task * self.rows)
            emit(first, bind(tirx.min(const(self.rows), self._batch - first)))

    def each_vector(self, rows: tirx.PrimExpr, emit: Emit) -> None:
        """Emit ``emit(row, offset, number)`` for each vector of the units of each sequence of a
        block."""
        with b.serial(0, rows) as row:
            self._vectors.each(self._size, lambda offset, number: emit(row, offset, number))
