"""Panels of the second factor of a matrix product: copies of its columns that a tile reads
sequentially."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, Vectors, bind, ceil_div, const
from ..language.extents import LINE
from ..language.halves import Tensor
from ..language.statements import Emit
from .product import Matmul
from .tile import Ahead

#: Panels of a task that are packed together, if B is row-major. A last panel is packed
#: alone.
_GROUP = 2


def _part_of(rows: Extent, part: tuple, emit: Emit, lines: int = 1) -> Ahead:
    """Return the prefetches of a part of some rows; the last part may have rows beyond.

    Parameters
    ----------
    rows : int or tirx.PrimExpr
        The rows of all parts.
    part : tuple
        The number of the part, and the number of parts.
    emit : Callable
        ``emit(i, j)`` emits the prefetch of line j of row i.
    lines : int
        The lines of a row.
    """
    at, parts = part
    each = ceil_div(rows, parts)
    first = bind(at * each)
    return Ahead(each, lambda i, j: emit(first + i, j), lines)


@dataclass(frozen=True)
class Packing:
    """The layout of panels, ``[k][width]``.

    Attributes
    ----------
    p : Matmul
        The products.
    vectors : Vectors
        The vectors.
    tile_vectors : int
        The vectors in a row of a panel.
    stretch : int
        The steps of k in a stretch; the last one may have fewer.
    multiple : int
        The number that divides the steps that are packed for a stretch.
    fills : bool
        Whether tiles read all vectors of a panel, also those without columns of B. Tiles of a
        symbolic number of columns do.
    ahead : int
        The steps of k that rows of B are prefetched before they are copied, or 0. They may be
        beyond the last one.
    """

    p: Matmul
    vectors: Vectors
    tile_vectors: int
    stretch: int = field(kw_only=True)
    multiple: int = field(default=4, kw_only=True)
    fills: bool = field(default=False, kw_only=True)
    ahead: int = field(default=0, kw_only=True)

    def aligned(self, depth: Extent) -> Extent:
        """Return the steps of k that are packed for a stretch of a size."""
        if not isinstance(depth, int):
            return depth
        return ceil_div(depth, self.multiple) * self.multiple

    @property
    def _is_of_vectors(self) -> bool:
        columns = self.p.columns
        return isinstance(columns, int) and columns % self.vectors.lanes == 0

    @property
    def width(self) -> int:
        """The columns of a panel."""
        return self.tile_vectors * self.vectors.lanes

    @property
    def panels(self) -> Extent:
        """The number of panels."""
        return ceil_div(self.p.columns, self.width)

    @property
    def shape(self) -> list[Extent]:
        """The shape of all panels."""
        return [self.panels, self.p.depth, self.width]

    def pack(self, source: tuple, target: tuple, depth: tuple, group: int = 1) -> None:
        """Copy a stretch of k of consecutive panels of B, ``[panel][k][width]``.

        Columns of a panel beyond B's are 0 or other columns of B, and vectors without columns are
        anything if no tile reads them.

        Parameters
        ----------
        source : tuple
            B, its offset, and the number of the first panel.
        target : tuple
            The buffer of the copy, its offset there, and the distance of panels.
        depth : tuple
            The start and the size of the stretch.
        group : int
            The number of panels.
        """
        (bb, b0, j), (panels, base, step), (k0, size) = source, target, depth
        p, lanes, width = self.p, self.vectors.lanes, self.width
        if p.transpose_b:
            with b.serial(0, group) as i:
                number = self.vectors_in(j + i)
                with b.serial(0, number) as v:
                    to = bind(base + i * step + v * lanes)
                    column = bind((j + i) * width + v * lanes)
                    self.vectors.copy_transposed(
                        (bb, bind(b0 + column * p.depth + k0), p.depth),
                        self.left(column),
                        size,
                        panels,
                        lambda k: to + k * width,
                        repeats=True,
                        strides=(width,),
                    )
                if self.fills or not isinstance(p.columns, int):
                    # Their products with denormal numbers would take long.
                    with b.serial(0, size) as k, b.serial(number, self.tile_vectors) as v:
                        at = base + i * step + k * width + v * lanes
                        self.vectors.store(panels, at, self.vectors.splat(0))
            return
        vectors = [(i, v * lanes) for i in range(group) for v in range(self.tile_vectors)]
        columns = [bind(self.existing((j + i) * width + at)) for i, at in vectors]
        left = [self.left(column) for column in columns]
        with b.serial(0, size) as k:
            row, to = bind(b0 + (k0 + k) * p.columns), bind(base + k * width)
            for column in columns if self.ahead else ():
                b.prefetch(bb, row + column + self.ahead * p.columns, level=1)
            for (i, at), column, number in zip(vectors, columns, left, strict=True):
                vector = self.vectors.load(bb, row + column, number)
                self.vectors.store(panels, to + i * step + at, vector)

    def prefetch(self, source: tuple, start: tirx.PrimExpr, part: tuple) -> Ahead:
        """Return the prefetches of a part of the elements that :meth:`pack` copies for a panel.

        Parameters
        ----------
        source : tuple
            B, its offset, and the number of the panel, which may be out of bounds.
        start : tirx.PrimExpr
            The first step of the stretch.
        part : tuple
            The number of the part, and the number of parts.
        """
        (bb, b0, j), p, width = source, self.p, self.width
        lines = ceil_div(self.stretch, LINE)

        def of_column(i: tirx.PrimExpr, _: object) -> None:
            column, line = bind(j * width + i // lines), bind(i % lines)
            b.prefetch(bb, b0 + column * p.depth + start + line * LINE)

        def of_row(i: tirx.PrimExpr, line: Extent) -> None:
            b.prefetch(bb, b0 + (start + i) * p.columns + j * width + line * LINE)

        if p.transpose_b:
            return _part_of(lines * width, part, of_column)
        return _part_of(self.stretch, part, of_row, ceil_div(width, LINE))

    def vectors_in(self, panel: tirx.PrimExpr) -> Extent:
        """Return the number of vectors of a panel that have columns of B."""
        columns = self.p.columns
        if isinstance(columns, int) and columns % self.width == 0:
            return self.tile_vectors
        left = ceil_div(columns - panel * self.width, self.vectors.lanes)
        return bind(tirx.min(const(self.tile_vectors), left))

    def existing(self, column: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the first column to copy for a vector. Vectors beyond the last column are not
        read: they copy other columns, so that no mask is needed unless a vector is partial."""
        columns, lanes = self.p.columns, self.vectors.lanes
        if not self._is_of_vectors or columns % self.width == 0:
            return column
        return tirx.min(column, const(columns - lanes))

    def left(self, column: tirx.PrimExpr) -> Extent | None:
        """Return the number of columns of a vector that exist, or None if all always do."""
        columns, lanes = self.p.columns, self.vectors.lanes
        if self._is_of_vectors:
            return None
        return bind(tirx.max(const(0), tirx.min(const(lanes), columns - column)))


class PanelSource(Protocol):
    """A way of packing: where a task has its panels, and when they are copied there."""

    def place(self) -> tirx.Buffer | None:
        """Allocate the buffer of a task, if it has one."""

    def fill(self, place: tirx.Buffer | None, columns: tuple, depth: tuple) -> None:
        """Pack a stretch of the panels of a task, unless each is packed later or all are."""

    def each(
        self, place: tirx.Buffer | None, columns: tuple, depth: tuple, among: tuple | None = None
    ) -> AbstractContextManager[tuple]:
        """Emit a loop over panels, as :meth:`Packed.each` does."""


class Packed:
    """All panels of B, ``[panel][k][width]``, in a buffer.

    Panels of another function are read from distant caches: with ``prefetch``, each is prefetched
    during the tiles of the one before.
    """

    def __init__(self, packing: Packing, panels: tirx.Buffer, *, prefetch: bool = False):
        self.depth, self.width, self.panels = packing.p.depth, packing.width, panels
        self.stretch = packing.stretch
        self.prefetches = prefetch

    def place(self) -> None:
        """Allocate nothing."""

    def fill(self, place: tirx.Buffer | None, columns: tuple, depth: tuple) -> None:
        """Emit nothing: the panels of a task exist."""

    @contextmanager
    def each(
        self, place: tirx.Buffer | None, columns: tuple, depth: tuple, among: tuple | None = None
    ) -> Iterator[tuple]:
        """Emit a loop over panels; yield the number of one, the buffer and the offset of its
        stretch, and None or a function.

        ``function(i, n)`` returns prefetches of the i-th of n parts of the next stretch of a panel.
        ``among`` are the panels of which those of ``columns`` are the next ones, if these are not
        all.
        """
        with b.serial(*columns) as j:
            ahead = self._ahead(j, among or columns, depth) if self.prefetches else None
            yield j, (self.panels, self._offset(j, depth[0])), ahead

    def _offset(self, panel: tirx.PrimExpr, k: tirx.PrimExpr) -> tirx.PrimExpr:
        return bind((panel * self.depth + k) * self.width)

    def _ahead(self, j: tirx.PrimExpr, columns: tuple, depth: tuple) -> Callable:
        (first, stop), (k0, size) = columns, depth
        is_last = bind(j + 1 >= stop)
        panel = b.computed(tirx.Select(is_last, first, j + 1))
        start = self._offset(panel, b.computed(tirx.Select(is_last, k0 + size, k0)))
        lines = ceil_div(self.stretch * self.width, LINE)
        return lambda i, n: _part_of(
            lines, (i, n), lambda line, _: b.prefetch(self.panels, start + line * LINE)
        )


class Early(Packed):
    """All panels of B, packed before the products, to a buffer of the function or a given one."""

    def __init__(
        self,
        packing: Packing,
        bb: Tensor,
        b0: tirx.PrimExpr,
        loop: Callable,
        panels: tirx.Buffer | None = None,
        *,
        prefetch: bool = False,
    ):
        size = packing.p.depth * packing.width
        panels = b.scratch(packing.panels * size) if panels is None else panels
        super().__init__(packing, panels, prefetch=prefetch)
        with loop(0, packing.panels) as j:
            packing.pack((bb, b0, j), (self.panels, bind(j * size), 0), (const(0), self.depth))


class Whole:
    """Stretches of the panels of a task, ``[panel][k][width]``, all packed by it before it reads
    the first one.

    A task has ``most`` panels at most.
    """

    def __init__(self, packing: Packing, bb: Tensor, b0: tirx.PrimExpr, most: int):
        self.packing, self.bb, self.b0, self.most = packing, bb, b0, most
        self.size = packing.aligned(packing.stretch) * packing.width

    def place(self) -> tirx.Buffer:
        """Allocate the buffer of a task."""
        return b.scratch(self.most * self.size)

    def fill(self, place: tirx.Buffer, columns: tuple, depth: tuple) -> None:
        """Pack a stretch of the panels of a task."""
        with b.serial(*columns) as j:
            to = bind((j - columns[0]) * self.size)
            self.packing.pack((self.bb, self.b0, j), (place, to, 0), depth)

    @contextmanager
    def each(
        self, place: tirx.Buffer, columns: tuple, depth: tuple, among: tuple | None = None
    ) -> Iterator[tuple]:
        """Emit a loop over panels; yield the number of one, its buffer and its offset, and None."""
        with b.serial(*columns) as j:
            yield j, (place, bind((j - columns[0]) * self.size)), None


class Late:
    """Stretches of panels of B, ``[panel][k][width]``, packed by the task that reads them, just
    before: each by itself if ``is_single``.

    With ``prefetch``, the next panel is prefetched during the tiles of each one.
    """

    def __init__(
        self,
        packing: Packing,
        bb: Tensor,
        b0: tirx.PrimExpr,
        *,
        prefetch: bool = False,
        is_single: bool = False,
    ):
        self.bb, self.b0 = bb, b0
        self.size = packing.aligned(packing.stretch) * packing.width
        # Rows of B are read in several cache lines at a time; transposed, a panel has
        # separate rows.
        self.group = 1 if packing.p.transpose_b or is_single else _GROUP
        self.prefetches = prefetch
        self.packing = replace(packing, ahead=0) if self.prefetches else packing

    def place(self) -> tirx.Buffer:
        """Allocate the buffer of a task."""
        return b.scratch(self.size * self.group)

    def fill(self, place: tirx.Buffer, columns: tuple, depth: tuple) -> None:
        """Emit nothing: each panel is packed before its tiles."""

    @contextmanager
    def each(
        self, place: tirx.Buffer, columns: tuple, depth: tuple, among: tuple | None = None
    ) -> Iterator[tuple]:
        """Emit a loop over panels that are packed; yield the number of one, its buffer and its
        offset, and None or a function.

        ``function(i, n)`` returns prefetches of the i-th of n parts of the panel that is packed
        after this one or its group: hardware prefetches few lines of rows that are pages apart.
        ``among`` are the panels of which those of ``columns`` are the next ones, if these are not
        all.
        """
        start, stop = columns
        with b.serial(0, ceil_div(stop - start, self.group)) as part:
            first = bind(start + part * self.group)
            source, target = (self.bb, self.b0, first), (place, const(0), self.size)

            def pack(
                group: int,
                source: tuple[Tensor | list[tirx.Buffer], tirx.PrimExpr, tirx.PrimExpr] = source,
                target: tuple[tirx.Buffer, tirx.PrimExpr, int] = target,
            ) -> None:
                self.packing.pack(source, target, depth, group)

            if self.group == 1:
                pack(1)
            else:
                b.either(first + self.group <= stop, lambda: pack(self.group), lambda: pack(1))
            with b.serial(0, bind(tirx.min(const(self.group), stop - first))) as i:
                j = bind(first + i)
                ahead = self._ahead(j, among or columns, depth) if self.prefetches else None
                yield j, (place, bind(i * self.size)), ahead

    def _ahead(self, j: tirx.PrimExpr, columns: tuple, depth: tuple) -> Callable:
        (start, stop), (k0, size) = columns, depth
        is_last = bind(j + self.group >= stop)
        panel = b.computed(tirx.Select(is_last, start + (j - start) % self.group, j + self.group))
        first = b.computed(tirx.Select(is_last, k0 + size, k0))
        source = (self.bb, self.b0, panel)
        return lambda i, n: self.packing.prefetch(source, first, (i, n))
