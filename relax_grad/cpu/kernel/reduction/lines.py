"""Lines of a tensor that softmax normalizes, rows or columns, and the plan of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, extent_as_text

#: The fewest columns, except a single one, that have a kernel: most lanes of a vector are unused
#: with fewer ones.
_FEWEST = 4


@dataclass(frozen=True)
class Lines:
    """A tensor ``[outer, extent, inner]`` that is normalized along its middle axis.

    Attributes
    ----------
    outer, extent, inner : int or tirx.PrimExpr
        The extents. If ``inner`` is 1, the lines are rows.
    """

    outer: Extent
    extent: Extent
    inner: Extent

    @property
    def are_rows(self) -> bool:
        return isinstance(self.inner, int) and self.inner == 1

    @staticmethod
    def along(shape: Sequence[Extent], axis: int) -> Lines | None:
        """Return the lines of a tensor along an axis; None if no kernel supports them."""
        axis %= len(shape)
        inner = prod(shape[axis + 1 :])
        if isinstance(inner, int) and 1 < inner < _FEWEST:
            return None
        return Lines(prod(shape[:axis]), shape[axis], inner)


@dataclass(frozen=True)
class LinesPlan(Plan):
    """The plan of softmax, its logarithm, and their gradients.

    Attributes
    ----------
    of : Lines
        The extents.
    lanes : int
        The elements of a vector.
    vectors : int
        The neighbouring columns of a block, in vectors; 0 if the lines are rows, of which a task
        has one.
    """

    of: Lines
    lanes: int
    vectors: int

    @property
    def width(self) -> int:
        """The columns of a block."""
        return self.vectors * self.lanes

    @property
    def blocks(self) -> Extent:
        """The blocks of columns for each outer index."""
        return ceil_div(self.of.inner, self.width)

    @property
    def last(self) -> int | None:
        """The columns that are left beside whole blocks; None if their number is symbolic."""
        inner = self.of.inner
        return inner % self.width if isinstance(inner, int) else None

    @property
    def has_whole_blocks(self) -> bool:
        """Whether any block may be whole."""
        return not isinstance(self.of.inner, int) or self.of.inner >= self.width

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        outer, extent, inner = map(extent_as_text, (self.of.outer, self.of.extent, self.of.inner))
        if self.of.are_rows:
            return {"lines": f"{outer} rows of {extent}", "tasks": f"{outer}, a row each"}
        rest = "some" if self.last is None else self.last
        return {
            "lines": f"{outer} x {inner} columns of {extent}",
            "block": f"{self.vectors} vectors of columns; {rest} columns are left for single "
            "vectors",
            "tasks": f"{outer} x {extent_as_text(self.blocks)} blocks",
        }


def lines_plan(of: Lines, cpu: CPU) -> LinesPlan:
    """Return the plan of a kernel of lines."""
    vectors = 0 if of.are_rows else cpu.tuning.reductions.softmax_vectors
    return LinesPlan(of, cpu.lanes, vectors)
