"""The sizes and layouts of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..language.builder import Extent, Vectors, const

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

    def starts(self, i: Extent) -> list:
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
            transpose_a=not self.transpose_b,
            transpose_b=not self.transpose_a,
            batch=self.batch,
            shared_a=self.shared_b,
            shared_b=self.shared_a,
        )

    def allows(self, way: str) -> bool:
        """Tell whether a product can be computed in one of :data:`WAYS`."""
        if way == "turned":
            return self.is_static and self.rows > 1 and self.columns > 1
        return way != "few rows" or is_one(self.rows) or not self.transpose_a


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

    def at(self, column: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the number of a column."""
        return self.numbers[const(0) if self.is_single else column]

    def vector_of(
        self, vectors: Vectors, start: tirx.PrimExpr, lengths: Sequence[Extent | None]
    ) -> Callable:
        """Return a function from v to the numbers of the v-th vector of columns.

        ``start`` is the first column of the first vector, and ``lengths`` are the columns of each
        vector that exist; None for all lanes.
        """

        def vector(v: int) -> tirx.PrimExpr:
            if self.is_single:
                return vectors.splat(self.at(start))
            return vectors.load(self.numbers, start + v * vectors.lanes, lengths[v])

        return vector


def is_one(extent: Extent) -> bool:
    """Tell whether an extent is known to be 1."""
    return isinstance(extent, int) and extent == 1
