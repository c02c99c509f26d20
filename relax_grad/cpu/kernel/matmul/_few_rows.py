"""Matrix products with few rows, limited by the memory bandwidth of reading B.

Packing B into panels would cost as much as multiplying it, so B is read in place: as vectors of its
rows, or, if it is stored as ``[n, k]``, as vectors along k, whose lanes are summed at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from ..language import builder as b
from ..language.builder import Accumulators, Extent, Vectors, bind, ceil_div, const
from ..language.halves import Tensor
from ..language.statements import Emit
from ._plans import InPlacePlan
from .product import Bias
from .tile import multiply_add, rows_up_to

#: The strips of rows up to which the code of each is emitted.
_MOST_UNROLLED = 4


class FewRows:
    """A generator of matrix products with few rows.

    Parameters
    ----------
    plan : InPlacePlan
        The plan of the products.
    bias : Bias, optional
        The numbers that are added to the columns of C.
    """

    def __init__(self, plan: InPlacePlan, bias: Bias | None = None):
        self.plan, self.bias = plan, bias
        product = plan.product
        self.rows, self.columns, self.depth = product.rows, product.columns, product.depth
        self.a_strides = (1, self.rows) if product.transpose_a else (self.depth, 1)
        self.vectors = Vectors(plan.lanes)

    def emit(self, a: Tensor, bb: Tensor, c: Tensor, batch: Extent, offsets: Callable) -> None:
        """Emit the products; ``offsets(i)`` returns the offsets of the i-th product in A, B and C.

        A task computes all rows of a tile's columns, so that B is read from memory once.
        """
        tiles = ceil_div(self.columns, self.plan.width)
        tile = self._dots if self.plan.product.transpose_b else self._rows
        with b.parallel(0, batch * tiles) as task:
            starts = [bind(start) for start in offsets(bind(task // tiles))]
            column = bind(task % tiles * self.plan.width)

            def strips(left: Extent | None) -> None:
                self._each_strip(lambda rows: tile((a, bb, c), starts, rows, column, left))

            self._of_width(column, strips)

    def _each_strip(self, emit: Emit) -> None:
        """Emit ``emit(rows)`` for each strip of rows."""
        rows, height = self.rows, self.plan.height
        if isinstance(rows, int):
            done, whole = 0, rows // height
            if whole > _MOST_UNROLLED:
                with b.serial(0, whole) as strip:
                    first = bind(strip * height)
                    emit([first + i for i in range(height)])
                done = whole * height
            for first in range(done, rows, height):
                emit(range(first, min(first + height, rows)))
            return
        with b.serial(0, ceil_div(rows, height)) as strip:
            first = bind(strip * height)
            emit([bind(first + i) for i in rows_up_to(first, height, rows)])

    def _of_width(self, column: tirx.PrimExpr, strips: Callable) -> None:
        """Emit tiles of the full width, and tiles of the remaining columns."""
        columns, width = self.columns, self.plan.width
        if isinstance(columns, int) and columns % width == 0:
            strips(None)
        elif isinstance(columns, int) and columns < width:
            strips(columns)
        else:
            left = columns % width if isinstance(columns, int) else bind(columns - column)
            b.either(column + width <= columns, lambda: strips(None), lambda: strips(left))

    def _rows(
        self,
        buffers: tuple[tirx.Buffer, tirx.Buffer, tirx.Buffer],
        starts: list[tirx.PrimExpr],
        rows: range | list[tirx.PrimExpr],
        column: tirx.PrimExpr,
        left: Extent | None,
    ) -> None:
        """Emit a tile whose vectors are parts of the rows of B."""
        (a, bb, c), (a0, b0, c0) = buffers, starts
        lanes, bias = self.plan.lanes, self.bias
        numbers: list = [None] * (self.plan.width // lanes)
        if isinstance(left, int):
            numbers = [min(lanes, left - at) for at in range(0, left, lanes)]
        elif left is not None:
            numbers = [
                bind(tirx.max(const(0), tirx.min(const(lanes), left - at)))
                for at in range(0, self.plan.width, lanes)
            ]

        def vector(k: tirx.PrimExpr, v: int) -> tirx.PrimExpr:
            at = bind(b0 + k * self.columns + column + v * lanes)
            if self.plan.ahead:
                b.prefetch(bb, at + self.plan.ahead * self.columns, level=1)
            return self.vectors.load(bb, at, numbers[v])

        multiply_add(
            self.vectors,
            (len(rows), len(numbers)),
            self.depth,
            value=lambda i, k: a[a0 + self._in_a(rows[i], k)],
            vector=vector,
            place=lambda i, v: (c, c0 + rows[i] * self.columns + column + v * lanes, numbers[v]),
            add=False,
            bias=None if bias is None else bias.vector_of(self.vectors, column, numbers),
        )

    def _dots(
        self,
        buffers: tuple[tirx.Buffer, tirx.Buffer, tirx.Buffer],
        starts: list[tirx.PrimExpr],
        rows: range | list[tirx.PrimExpr],
        column: tirx.PrimExpr,
        left: Extent | None,
    ) -> None:
        """Emit a tile whose vectors run along k."""
        (a, bb, c), (a0, b0, c0) = buffers, starts
        width = left if isinstance(left, int) else self.plan.width
        columns = [column + j for j in range(width)]
        if left is not None and not isinstance(left, int):
            columns = [bind(tirx.min(at, self.columns - 1)) for at in columns]
        places = [bind(b0 + at * self.depth) for at in columns]
        total = Accumulators(self.vectors, len(rows) * width)
        for index in range(len(rows) * width):
            total[index] = self.vectors.splat(0)

        def add(k: tirx.PrimExpr, number: Extent | None) -> None:
            terms = [bind(self.vectors.load(bb, place + k, number)) for place in places]
            for i, row in enumerate(rows):
                factor = bind(self.vectors.load(a, a0 + row * self.depth + k, number))
                for j, term in enumerate(terms):
                    index = i * width + j
                    total[index] = total[index] + factor * term

        self.vectors.each(self.depth, add)
        terms = [] if self.bias is None else [bind(self.bias.at(at)) for at in columns]
        # Columns beyond the last one repeat the last one, and store the same values.
        for i, row in enumerate(rows):
            for j, at in enumerate(columns):
                value = self.vectors.sum(total[i * width + j])
                value = value + terms[j] if terms else value
                b.store(c, c0 + row * self.columns + at, value)

    def _in_a(self, row: Extent, k: tirx.PrimExpr) -> tirx.PrimExpr:
        return row * self.a_strides[0] + k * self.a_strides[1]
