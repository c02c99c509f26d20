"""Plans of sums over the rows of matrices: stretches of rows, and blocks of columns."""

from __future__ import annotations

from dataclasses import dataclass

from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, extent_as_text

#: The number of stretches that rows are divided into, if there are enough rows, and the minimum
#: number of rows of a stretch. Stretches are the order of additions.
_STRETCHES, _STRETCH = 8, 32


@dataclass(frozen=True)
class ColumnSumsPlan(Plan):
    """The plan of sums over the rows of ``[outer, rows, columns]``.

    Each task sums a stretch of rows for a block of columns. The sums have the same bits in
    registers and in the cache.

    Attributes
    ----------
    outer, rows : int or tirx.PrimExpr
        The extents.
    columns : int
        The extent of the last axis.
    lanes : int
        The elements of a vector.
    stretches : int
        The parts of the rows, whose sums are added at the end.
    in_registers : bool
        Whether the sums of a block are kept in registers, and not in the cache.
    vectors : int
        The vectors of a block of columns.
    rows_at_once : int
        The rows that are added at once to sums in the cache.
    """

    outer: Extent
    rows: Extent
    columns: int
    lanes: int
    stretches: int
    in_registers: bool
    vectors: int
    rows_at_once: int

    @property
    def width(self) -> int:
        """The columns of a block."""
        return self.vectors * self.lanes

    @property
    def blocks(self) -> int:
        """The number of blocks of columns."""
        return ceil_div(self.columns, self.width)

    @property
    def tasks(self) -> Extent:
        """The number of tasks."""
        return self.outer * (self.stretches * self.blocks)

    @property
    def last(self) -> int:
        """The columns of the last block."""
        return self.columns - (self.blocks - 1) * self.width

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        outer, rows = extent_as_text(self.outer), extent_as_text(self.rows)
        places = "registers" if self.in_registers else f"a cache, {self.rows_at_once} rows at once"
        return {
            "sums": f"over {rows} rows of {outer} x {self.columns} columns, in {places}",
            "block": f"{self.vectors} vectors of columns, {self.last} columns in the last block",
            "tasks": f"{outer} x {self.stretches} stretches of rows x {self.blocks} blocks",
        }


def column_sums_plan(
    extents: tuple[Extent, Extent, int], cpu: CPU, operands: int = 1
) -> ColumnSumsPlan:
    """Return the plan of sums over the rows of ``[outer, rows, columns]``.

    Parameters
    ----------
    extents : tuple
        The extents; ``columns`` is not symbolic.
    cpu : CPU
        The target CPU.
    operands : int
        The number of tensors of these extents that the terms are computed from.
    """
    (outer, rows, columns), limits = extents, cpu.tuning.reductions
    is_short = isinstance(rows, int) and rows < _STRETCH
    vectors = ceil_div(columns, cpu.lanes)
    in_registers = vectors <= limits.register_vectors or is_short
    if in_registers:
        vectors = min(limits.register_vectors, vectors)
    else:
        vectors = ceil_div(vectors, ceil_div(columns, limits.cache_columns))
    stretches = _stretches(outer, rows, cpu)
    if isinstance(outer, int):
        while vectors > 1 and _tasks(outer * stretches, columns, vectors, cpu) < cpu.cores:
            vectors = vectors // 2
    # Rows of several operands that a block holds whole are added one by one: each operand is read
    # in order from its beginning to its end, and 16 rows would displace each other where their
    # length is a multiple of 4 KiB.
    one_by_one = operands > 1 and columns <= limits.cache_columns
    return ColumnSumsPlan(
        *(outer, rows, columns, cpu.lanes),
        stretches=stretches,
        in_registers=in_registers,
        vectors=vectors,
        rows_at_once=1 if one_by_one else limits.rows_at_once,
    )


def _stretches(outer: Extent, rows: Extent, cpu: CPU) -> int:
    """Return the number of stretches of rows: one if there are tasks enough without them."""
    if isinstance(outer, int) and outer >= 2 * cpu.cores:
        return 1
    return max(1, min(_STRETCHES, rows // _STRETCH)) if isinstance(rows, int) else _STRETCHES


def _tasks(parts: int, columns: int, vectors: int, cpu: CPU) -> int:
    return parts * ceil_div(columns, vectors * cpu.lanes)
