"""The passes of a recurrent layer: its packed weights, and the tasks that compute all steps of some
sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tvm import tirx

from ...target import CPU
from ..language.builder import Extent, Vectors, bind
from ._parts import Factors, Rows, Tasks, TiledWeight, Weight
from .layer import Layer


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
    """The forward or the backward pass of a layer.

    Parameters
    ----------
    of : Layer
        The layer.
    cpu : CPU
        The target CPU.
    factors : Factors
        The elements that products multiply.
    source : tirx.Buffer
        The weight.
    is_turned : bool
        Whether products read the weight transposed.
    """

    def __init__(
        self, of: Layer, cpu: CPU, factors: Factors, source: tirx.Buffer, *, is_turned: bool
    ):
        self.of, self.tasks, self.vectors = of, Tasks(of.batch, of.size, cpu), Vectors(cpu.lanes)
        self.factors, self.source = factors, source
        size = of.size
        # The gate n of a GRU that resets first has a separate product.
        self.is_reset = of.kind == "gru_reset"
        together = (2 if self.is_reset else of.gates) * size
        sizes = (together, size) if is_turned else (size, together)
        self.weight = self._weight(cpu, *sizes, is_turned)
        self.last = self._weight(cpu, size, size, is_turned, together * size)

    def _weight(
        self, cpu: CPU, columns: int, depth: int, is_turned: bool, start: int = 0
    ) -> Weight | TiledWeight:
        if self.factors is Factors.TILES:
            return TiledWeight(cpu, columns, depth, is_turned, start)
        pairs = self.factors is Factors.PAIRS
        return Weight(
            cpu, columns, depth, is_turned=is_turned, rows=self.tasks.rows, start=start, pairs=pairs
        )

    def _rows(self, size: int, *, exact: bool = False) -> Rows:
        """Allocate rows of a task that products read."""
        return Rows(self.vectors, self.tasks.rows, size, self.factors, exact=exact)

    def emit(self) -> None:
        """Emit the pass."""
        self.weight.pack(self.source)
        if self.is_reset:
            self.last.pack(self.source)
        self.tasks.each(self._block)

    @abstractmethod
    def _block(self, first: Extent, rows: Extent) -> None:
        """Emit all steps of some sequences of the batch, given the first one and their number."""
