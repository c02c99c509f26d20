"""The passes of a recurrent layer: its packed weights, and the tasks that compute all steps of some
sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, Vectors, bind, const
from ._parts import Rows, TiledWeight, Weight
from .plan import Factors, RecurrentPlan


@dataclass(frozen=True)
class Units:
    """A vector of units of a sequence, at a step.

    Attributes
    ----------
    place : tirx.PrimExpr
        The sequence and the step: its row, counted through all steps.
    row : tirx.PrimExpr
        The sequence in the task.
    offset : tirx.PrimExpr
        The first unit.
    number : int or tirx.PrimExpr, optional
        The number of units that exist; None for a whole vector.
    """

    place: Extent
    row: Extent
    offset: Extent
    number: Extent | None

    def at(self, parts: int, size: int, part: int = 0) -> tirx.PrimExpr:
        """Return the index of a part of the units among values of all steps, ``parts`` of each
        unit, for layers of ``size`` units."""
        return bind(self.place * (parts * size) + self.offset + part * size)

    def local(self, pitch: int, shift: int = 0) -> tirx.PrimExpr:
        """Return the index of the units in rows of the task."""
        return bind(self.row * pitch + self.offset + shift)


class Pass(ABC):
    """The forward or the backward pass of a layer, which begins with the copy of the weight.

    Parameters
    ----------
    plan : RecurrentPlan
        The sizes, the tasks and the tiles.
    weight : tirx.Buffer
        The weight.
    """

    def __init__(self, plan: RecurrentPlan, weight: tirx.Buffer):
        self.plan, self.of, self.vectors = plan, plan.of, Vectors(plan.lanes)
        packed = TiledWeight if plan.factors is Factors.TILES else Weight
        self.weights = [packed(each, weight) for each in plan.weights]

    def emit(self) -> None:
        """Emit the tasks."""
        rows = self.plan.rows
        with b.parallel(0, self.plan.tasks) as task:
            first = bind(task * rows)
            self._block(first, bind(tirx.min(const(rows), self.of.batch - first)))

    @abstractmethod
    def _block(self, first: Extent, rows: Extent) -> None:
        """Emit all steps of some sequences of the batch, given the first one and their number."""

    def _each(self, start: Extent, rows: Extent, emit: Callable[[Units], None]) -> None:
        """Emit ``emit(units)`` for each vector of the units of each sequence of a task, at a step
        whose first sequence has the row ``start``."""
        with b.serial(0, rows) as row:

            def some(offset: tirx.PrimExpr, number: Extent | None) -> None:
                emit(Units(bind(start + row), row, offset, number))

            self.vectors.each(self.of.size, some)

    def _rows(self, size: int, *, exact: bool = False) -> Rows:
        """Allocate rows of a task that products read."""
        return Rows(self.vectors, self.plan.rows, size, self.plan.factors, exact=exact)

    def _load(
        self, buffer: tirx.Buffer, units: Units, parts: int = 1, part: int = 0
    ) -> tirx.PrimExpr:
        """Return a part of values of all steps, which have so many parts."""
        return self.vectors.load(buffer, units.at(parts, self.of.size, part), units.number)

    def _put(
        self,
        buffer: tirx.Buffer,
        units: Units,
        value: tirx.PrimExpr,
        parts: int = 1,
        part: int = 0,
    ) -> None:
        """Emit the store of a part of values of all steps."""
        self.vectors.store(buffer, units.at(parts, self.of.size, part), value, units.number)
