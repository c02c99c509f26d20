"""The keys of a block that the queries of a block attend to."""

from __future__ import annotations

from tvm import tirx

from ..language.builder import bind, ceil_div, const
from ..language.extents import Extent
from .plan import AttentionPlan


class Span:
    """A block of keys for a block of queries.

    Attributes
    ----------
    start : tirx.PrimExpr
        The first key.
    size : tirx.PrimExpr
        The number of keys that any of the queries attends to, counted from the first one.
    """

    def __init__(
        self, plan: AttentionPlan, first: tirx.PrimExpr, rows: tirx.PrimExpr, start: tirx.PrimExpr
    ):
        self._of, self._plan, self._first, self._rows = plan.of, plan, first, rows
        self.start = start
        end = self._of.end_of(first + rows - 1)
        # The last queries of all may end before the first key.
        self.size = bind(tirx.max(const(0), tirx.min(const(plan.columns), end - start)))

    def is_whole(self, rows: tirx.PrimExpr) -> tirx.PrimExpr:
        """Tell whether every query attends to as many keys as a block has."""
        whole = self._of.end_of(self._first) >= self.start + self._plan.columns
        if self._of.window_size is None:
            return whole
        return tirx.all(whole, self._of.start_of(self._first + rows - 1) <= self.start)

    def query(self, row: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the query of a row."""
        return self._first + row

    def limits(self, row: tirx.PrimExpr) -> tuple:
        """Return the range of the keys of a query within the block."""
        query = self._first + row
        low = self._of.start_of(query) - self.start if self._of.window_size is not None else None
        return low, bind(self._of.end_of(query) - self.start)

    def depth_of(self, row: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the number of keys, from the first one, that the tile with a row attends to."""
        if self._of.causal_mask is None:
            return self.size
        height = self._plan.tile_rows
        last = tirx.min(row // height * height + (height - 1), self._rows - 1)
        end = self._of.end_of(self._first + last) - self.start
        return bind(tirx.max(const(0), tirx.min(self.size, end)))

    def extent_of(self, row: tirx.PrimExpr, is_masked: bool) -> Extent:
        """Return the number of keys in the panels of :meth:`panels_of`, without padding."""
        of = self._of
        if not is_masked:
            return self._plan.columns
        if of.causal_mask is None and of.has_few_keys:
            return of.keys
        return bind(tirx.min(self.size, self.panels_of(row) * self._plan.width))

    def panels_of(self, row: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the number of panels of :meth:`depth_of`."""
        return bind(ceil_div(self.depth_of(row), self._plan.width))

    def first_row(self, key: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the first row whose query attends to a key, counted from the first one; all rows
        if none does."""
        if self._of.causal_mask is None:
            return const(0)
        row = self.start + key - self._of.offset - self._first
        return bind(tirx.max(const(0), tirx.min(row, self._rows)))

    def first_strip(self, panel: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the first strip of rows that attends to a panel of keys."""
        if self._of.causal_mask is None:
            return const(0)
        key = self.start + panel * self._plan.width
        row = key - self._of.offset - self._first
        return bind(tirx.max(const(0), row) // self._plan.tile_rows)
