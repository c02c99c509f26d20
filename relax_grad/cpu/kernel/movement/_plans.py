"""Plans of copies and scatter-adds: the parts of rows that tasks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...target import CPU
from ..language.builder import Extent, ceil_div, count
from ..language.extents import LINE
from ..language.plans import Plan, extent_as_text


@dataclass(frozen=True)
class CopyPlan(Plan):
    """The plan of a concatenation or a split: copies between parts and a whole, row by row.

    Attributes
    ----------
    outer, row : int or tirx.PrimExpr
        The rows of the whole, and their elements.
    lengths : tuple[int or tirx.PrimExpr, ...]
        The elements of the rows of each part.
    size : int
        The bytes of an element.
    shares : int
        The tasks of a row.
    in_one_thread : bool
        Whether one thread has all tasks.
    """

    outer: Extent
    row: Extent
    lengths: tuple[Extent, ...]
    size: int
    shares: int
    in_one_thread: bool

    @property
    def line(self) -> int:
        """The elements of a cache line, at multiples of which shares begin."""
        return max(1, 4 * LINE // self.size)

    def step(self, length: Extent) -> Extent:
        """Return the elements of a share of a row of a part."""
        return ceil_div(ceil_div(length, self.shares), self.line) * self.line

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        outer, row = extent_as_text(self.outer), extent_as_text(self.row)
        return {
            "copies": f"{outer} rows of {row} elements in {len(self.lengths)} parts",
            "tasks": f"{outer} x {self.shares} shares of a row",
            "threads": "one" if self.in_one_thread else "all",
        }


def copy_plan(axis: int, shapes: Sequence[Sequence[Extent]], size: int, cpu: CPU) -> CopyPlan:
    """Return the plan of the copies between tensors along an axis and the whole.

    Parameters
    ----------
    axis : int
        The axis.
    shapes : Sequence
        The shapes of the parts in their order, and of the whole.
    size : int
        The bytes of an element.
    cpu : CPU
        The target CPU.
    """
    *parts, whole = shapes
    outer, inner = count(whole[:axis]), count(whole[axis + 1 :])
    row = whole[axis] * inner
    is_known = isinstance(outer, int) and isinstance(row, int)
    return CopyPlan(
        *(outer, row, tuple(shape[axis] * inner for shape in parts), size),
        shares=_shares_of_copies(outer, row, size, cpu),
        in_one_thread=is_known and outer * row * size < cpu.tuning.copies.one_thread,
    )


def _shares_of_copies(outer: Extent, row: Extent, size: int, cpu: CPU) -> int:
    """Return the number of parts of a row such that there are several tasks for each core."""
    wanted = cpu.tuning.copies.core_tasks * cpu.cores
    if not isinstance(outer, int) or outer >= wanted:
        return 1
    most = ceil_div(wanted, outer)
    least = cpu.tuning.copies.part
    return max(1, min(most, row * size // least)) if isinstance(row, int) else most


@dataclass(frozen=True)
class ScatterPlan(Plan):
    """The plan of a scatter-add to the rows of ``[outer, rows, columns]``.

    Each task owns a range of columns and of rows.

    Attributes
    ----------
    outer, rows : int or tirx.PrimExpr
        The extents.
    columns : int
        The elements of a row.
    lanes : int
        The elements of a vector.
    width : int
        The columns of a task, whole vectors.
    shares : int
        The ranges of rows.
    clears : int
        The tasks that set the result to 0.
    """

    outer: Extent
    rows: Extent
    columns: int
    lanes: int
    width: int
    shares: int
    clears: int

    @property
    def parts(self) -> int:
        """The ranges of columns."""
        return ceil_div(self.columns, self.width)

    @property
    def last(self) -> int:
        """The columns of the last range."""
        return self.columns - (self.parts - 1) * self.width

    @property
    def share(self) -> Extent:
        """The rows of a range."""
        return ceil_div(self.rows, self.shares)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        outer, rows = extent_as_text(self.outer), extent_as_text(self.rows)
        return {
            "result": f"{outer} x {rows} rows of {self.columns}, set to 0 by {self.clears} tasks",
            "columns": f"{self.parts} ranges of {self.width}, the last one of {self.last}",
            "tasks": f"{outer} x {self.parts} ranges of columns x {self.shares} of rows",
        }


def scatter_plan(outer: Extent, rows: Extent, columns: int, cpu: CPU) -> ScatterPlan:
    """Return the plan of a scatter-add to the rows of ``[outer, rows, columns]``."""
    copies, lanes = cpu.tuning.copies, cpu.lanes
    parts = max(1, min(cpu.cores, columns // (copies.row_vectors * lanes)))
    width = ceil_div(ceil_div(columns, parts), lanes) * lanes
    return ScatterPlan(
        *(outer, rows, columns, lanes, width),
        shares=_shares_of_rows(outer * ceil_div(columns, width), rows, cpu),
        clears=copies.core_tasks * cpu.cores,
    )


def _shares_of_rows(tasks: Extent, rows: Extent, cpu: CPU) -> int:
    """Return the number of shares of the rows such that there is a task for each core."""
    if not isinstance(tasks, int):
        return 1
    shares = ceil_div(cpu.cores, tasks)
    return min(shares, rows) if isinstance(rows, int) else shares
