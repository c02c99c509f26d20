"""The sizes and layouts of matrix products, and the choice of the way to compute them.

The limits are the crossovers of ``benchmarks/products.py --candidates`` with AVX2 and AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..target import CPU
from .builder import Extent, Vectors, ceil_div, const

#: Steps of k that a tile sums over at once.
DEPTH = 256

#: Steps of k in a round of a tile's loop. Fewer jumps leave a core more of what it shares with
#: another thread, and the end of few rounds is predicted.
ROUND = 4

#: The bytes of a factor up to which it stays in a second-level cache, so that prefetches do not
#: help.
CACHED = 2**20

#: The steps of k that parts of rows are prefetched before they are read: those of successive steps
#: lie apart, and processors prefetch within a page.
_STEPS_AHEAD = 4

#: The least elements of a row of which parts are prefetched for a copy.
_LEAST_APART = 512

#: The elements of a cache line.
LINE = 16

#: The maximum number of rows for which B is not packed: if it is read in rows, and if its vectors
#: run along k.
_FEW_ROWS, _FEW_DOTS = 32, 16

#: The same with 16 registers, if the rows of B share few sets of a cache, or are one vector at
#: most: few registers hold too few sums to hide the latency of multiply-adds.
_FEW_CROWDED = 8

#: The same, if B has more bytes than this, for Intel's processors with AVX-512 and for processors
#: with 16 registers: short parts of its rows are read slowly from distant caches. Intel's have
#: another limit for rows that are many, or share few sets of a cache.
_FEW_DISTANT, _NEAR_OF_INTEL, _NEAR = 8, 2**21, 2**22
_MANY_STEPS, _NEAR_OF_MANY = 2048, 3 * 2**19

#: The same for Intel's processors before Ice Lake with AVX-512, and with AVX2, if B has more bytes
#: than this, and at least so many rows. With AVX-512, the limit of distant caches.
_FEW_EARLY_WIDE, _FEW_EARLY, _NEAR_EARLY, _STEPS_EARLY = 24, 8, 2**18, 128
_NEAR_EARLY_WIDE = 6 * 2**20

#: The same for those with AVX2, if B has more bytes than this, or its rows share few sets of a
#: cache.
_FEWEST_EARLY, _FAR_EARLY = 4, 3 * 2**19

#: The same with 32 registers, if a row of B is one vector: packing it gains nothing. A product with
#: more steps is divided between threads, which have rows of their own if B is packed.
_FEW_OF_ONE_VECTOR, MOST_STEPS = 64, 1024

#: The elements of A up to which B is not packed if it is transposed and has fewer columns than
#: this, and not a multiple of the lanes.
_MASKED_SIZE, _NARROW = 2**18, 32

#: The rows from which packing gains the most if a panel of Intel's wide tiles has no empty lanes.
_ROWS_OF_FILLED = 12

#: Multiply-adds that a vector lane computes in a nanosecond, and bytes that a core reads from its
#: second-level cache.
PER_LANE_NS, _BYTES_PER_NS = 6.4, 100

#: The steps of k up to which the tiles of rows of C follow each other: with wide tiles for Intel's
#: processors and for those before Ice Lake, and otherwise.
_SHALLOW_OF_INTEL, _SHALLOW = 64, 32

#: The rows for each step from which the tiles of rows follow each other, if B is packed before.
_ROWS_OF_PACKED = 6

#: The ways to compute a product: B is read in place, or packed, or the factors change places.
WAYS = ("few rows", "packed", "turned")


@dataclass(frozen=True)
class Matmul:
    """The shapes and layouts of a batch of matrix products. Extents may be symbolic (int32).

    Attributes
    ----------
    rows, columns, depth : int or tirx.PrimExpr
        The extents of m, n and k.
    transpose_a, transpose_b : bool
        Whether A is stored as ``[k, m]``, and B as ``[n, k]``.
    batch : int or tirx.PrimExpr
        The number of products.
    shared_a, shared_b : bool
        Whether all products share one A, or one B.
    """

    rows: Extent
    columns: Extent
    depth: Extent
    transpose_a: bool = False
    transpose_b: bool = False
    batch: Extent = 1
    shared_a: bool = False
    shared_b: bool = False

    @property
    def is_static(self) -> bool:
        """Whether all extents are known."""
        extents = (self.batch, self.rows, self.columns, self.depth)
        return all(isinstance(extent, int) for extent in extents)

    def shapes(self) -> list[list[Extent]]:
        """Return the shapes of A, B and C."""
        a = [self.depth, self.rows] if self.transpose_a else [self.rows, self.depth]
        b = [self.columns, self.depth] if self.transpose_b else [self.depth, self.columns]
        shapes = [(a, self.shared_a), (b, self.shared_b), ([self.rows, self.columns], False)]
        return [
            shape if shared or is_one(self.batch) else [self.batch, *shape]
            for shape, shared in shapes
        ]

    @property
    def elements_of_k(self) -> Extent:
        """The extent of k in A and B as they are stored."""
        return self.depth

    def starts(self, i) -> list:
        """Return the offsets of the i-th product in A, B and C."""
        depth = self.elements_of_k
        sizes = (self.rows * depth, self.columns * depth, self.rows * self.columns)
        shared = (self.shared_a, self.shared_b, False)
        return [
            const(0) if is_shared else i * size
            for size, is_shared in zip(sizes, shared, strict=True)
        ]

    def turned(self) -> Matmul:
        """Return the product of B and A, both transposed, whose result is C transposed."""
        return Matmul(
            self.columns,
            self.rows,
            self.depth,
            not self.transpose_b,
            not self.transpose_a,
            self.batch,
            self.shared_b,
            self.shared_a,
        )

    def allows(self, way: str) -> bool:
        """Tell whether a product can be computed in one of :data:`WAYS`."""
        if way == "turned":
            return self.is_static and self.rows > 1 and self.columns > 1
        return way != "few rows" or is_one(self.rows) or not self.transpose_a

    def most_few_rows(self, cpu: CPU) -> int:
        """Return the number of rows up to which packing B costs more than it saves."""
        if not self.transpose_b:
            return self._most_rows_in_place(cpu)
        # Summing the lanes of a vector takes about as long as that many multiplications.
        if self.transpose_a:
            return 1
        depth = self.depth if isinstance(self.depth, int) else DEPTH
        columns = self.columns
        if isinstance(columns, int) and columns < _NARROW and columns % cpu.lanes:
            # Panels would have zeros in part of their lanes. Each tile of columns reads all of A.
            most = max(4, depth // 8 if depth < 128 else _MASKED_SIZE // depth)
            if cpu.intel and cpu.lanes > 8:
                filled = columns / (ceil_div(columns, cpu.lanes) * cpu.lanes)
                most = min(most, max(4, int(_ROWS_OF_FILLED / filled**3)))
            return most
        return max(4, min(_FEW_DOTS if cpu.lanes > 8 else 2 * _FEW_DOTS, depth // 16))

    def _most_rows_in_place(self, cpu: CPU) -> int:
        """Return :meth:`most_few_rows` of a B that is read in rows."""
        # Few registers hold few rows: B is read several times, from few sets of a cache if its
        # rows share them.
        if not isinstance(self.columns, int):
            return _FEW_ROWS
        steps = self.depth if isinstance(self.depth, int) else 0  # 0: unknown
        size = 4 * self.columns * steps
        is_crowded = steps >= DEPTH and share_sets(self.columns)
        is_early = cpu.before_icelake and cpu.lanes > 8
        if is_early and (size > _NEAR_EARLY_WIDE or steps >= _MANY_STEPS):
            return _FEW_DISTANT
        if cpu.intel and not is_early:
            is_far = is_crowded or steps >= _MANY_STEPS
            if size > (_NEAR_OF_MANY if is_far else _NEAR_OF_INTEL):
                return _FEW_DISTANT
        if cpu.before_icelake:
            if not is_early and (is_crowded or size > _FAR_EARLY):
                return _FEWEST_EARLY
            if size > _NEAR_EARLY and steps >= _STEPS_EARLY:
                return _FEW_EARLY_WIDE if is_early else _FEW_EARLY
        if cpu.registers < 32:
            is_short = self.columns <= cpu.lanes or size > _NEAR
            return _FEW_CROWDED if is_crowded or is_short else _FEW_ROWS
        has_few_steps = 0 < steps <= MOST_STEPS
        is_vector = self.columns == cpu.lanes and has_few_steps and not self.transpose_a
        return _FEW_OF_ONE_VECTOR if is_vector else _FEW_ROWS

    def nanoseconds(self, cpu: CPU) -> float:
        """Return an estimate of the time that one thread takes, infinite for symbolic extents."""
        if not self.is_static:
            return float("inf")
        batch, rows, columns, depth = self.batch, self.rows, self.columns, self.depth
        width = columns if self.transpose_b else ceil_div(columns, cpu.lanes) * cpu.lanes
        size = 4 * depth * (rows + columns)
        lanes = PER_LANE_NS * cpu.lanes
        return batch * max(rows * width * depth / lanes, size / _BYTES_PER_NS)


@dataclass(frozen=True)
class Bias:
    """Numbers that are added to the columns of a product, before its sums are rounded.

    Attributes
    ----------
    numbers : tirx.Buffer
        A number for each column, or a single one.
    is_single : bool
        Whether the columns share one number.
    """

    numbers: tirx.Buffer
    is_single: bool = False

    def at(self, column):
        """Return the number of a column."""
        return self.numbers[const(0) if self.is_single else column]

    def vector_of(self, vectors: Vectors, start, lengths: Sequence[Extent | None]) -> Callable:
        """Return a function from v to the numbers of the v-th vector of columns.

        ``start`` is the first column of the first vector, and ``lengths`` are the columns of each
        vector that exist; None for all lanes.
        """

        def vector(v: int):
            if self.is_single:
                return vectors.splat(self.at(start))
            return vectors.load(self.numbers, start + v * vectors.lanes, lengths[v])

        return vector


def writes_rows(product: Matmul, cpu: CPU) -> bool:
    """Tell whether the tiles of a strip are computed one after the other, and not those of a panel.

    Sums of few steps take less time than their stores. The caches write rows of C faster than short
    parts of many rows. Vectors of a whole cache line must not begin within one, unless tiles are
    wide.
    """
    columns, depth = product.columns, product.depth
    is_intel = cpu.intel or cpu.before_icelake
    if not product.is_static or depth > (_SHALLOW_OF_INTEL if is_intel else _SHALLOW):
        return False
    if product.transpose_b and product.rows < _ROWS_OF_PACKED * depth:
        return False
    is_aligned = cpu.intel or cpu.lanes < LINE or columns % LINE == 0
    return is_aligned and columns > (4 if cpu.intel else 2) * cpu.lanes


def steps_ahead(cpu: CPU) -> int:
    """Return the steps of k that parts of the rows of a factor are prefetched before they are read;
    0 for processors on which that was not measured."""
    return _STEPS_AHEAD if cpu.intel or cpu.before_icelake else 0


def steps_ahead_of_copy(cpu: CPU, stride: Extent, steps: Extent) -> int:
    """Return the same for a copy of a factor: 0 if caches near the core hold it, or its rows are
    short, as the processor prefetches these."""
    size = stride * steps
    is_near = isinstance(size, int) and 4 * size <= CACHED
    is_short = isinstance(stride, int) and stride < _LEAST_APART
    return 0 if is_near or is_short else steps_ahead(cpu)


def is_one(extent: Extent) -> bool:
    """Tell whether an extent is known to be 1."""
    return isinstance(extent, int) and extent == 1


def share_sets(stride: Extent) -> bool:
    """Tell whether rows of a stride, a multiple of 2 KB, are known to share few sets of a
    first-level cache."""
    return isinstance(stride, int) and stride % 512 == 0
