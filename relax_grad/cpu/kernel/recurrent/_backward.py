"""The backward pass of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, bind, const
from ..language.halves import Half
from ._parts import Factors, Rows
from ._pass import Pass, Units
from .layer import Layer


class Backward(Pass):
    """The backward pass of a layer.

    Parameters
    ----------
    inputs, results : Sequence[tirx.Buffer]
        The tensors of the operator.
    unread : Sequence[int]
        The indices of results that nothing reads.
    of, cpu, factors
        As for :class:`Pass`.
    """

    def __init__(
        self,
        of: Layer,
        cpu: CPU,
        factors: Factors,
        *,
        inputs: Sequence,
        results: Sequence,
        unread: Sequence[int],
    ):
        self.grad, self.slopes, source, *cells = inputs
        super().__init__(of, cpu, factors, source, is_turned=False)
        self.keeps_states = 1 not in unread
        self.cells = cells[0] if cells else None
        self.gates, self.states, *self.initial = results

    def _block(self, first: Extent, rows: Extent) -> None:
        of, size, pitch = self.of, self.of.size, self.weight.pitch
        # The gradients of the states before a step, through this step.
        through = b.scratch(self.tasks.rows * pitch)
        b.clear(through, const(0), self.tasks.rows * pitch)
        cell = None
        if of.kind == "lstm":
            cell = b.scratch(self.tasks.rows * pitch)
            b.clear(cell, const(0), self.tasks.rows * pitch)
        width = of.gates * size
        #: The gradients of the gates of a step that each product reads; none: they are the result.
        self.read: list[Rows] = []
        if isinstance(self.gates, Half):
            sizes = [2 * size, size] if self.is_reset else [width]
            self.read = [self._rows(each) for each in sizes]
        reset = b.scratch(self.tasks.rows * pitch) if self.is_reset else None
        with b.serial(0, of.steps) as step:
            start = bind((of.steps - 1 - step) * of.batch + first)

            def left(product: int = 0, start: Extent = start) -> tuple:
                if self.read:
                    return self.read[product].left()
                return self.gates, bind(start * width + 2 * size * product), width

            def each(emit: Callable, other: tirx.Buffer | None, start: Extent = start) -> None:
                self.tasks.each_vector(
                    rows,
                    lambda row, offset, number: emit(
                        Units(bind(start + row), row, offset, number), through, other
                    ),
                )

            each(self._unit, cell)
            if self.is_reset:
                self.last.multiply(left(1), reset, rows, add=False)
                each(self._reset, reset)
            self.weight.multiply(left(), through, rows, add=of.kind.startswith("gru"))
        for target, source in zip(self.initial, (through, cell), strict=False):
            with b.serial(0, rows) as row:
                b.copy(target, bind((first + row) * size), source, bind(row * pitch), const(size))

    def _unit(self, units: Units, through: tirx.Buffer, cell: tirx.Buffer | None) -> None:
        """Emit the gradients of the gates; ``cell`` has the gradients of an LSTM's cells."""
        of, vectors, number = self.of, self.vectors, units.number
        local = units.local(self.weight.pitch)
        own = bind(units.place * of.size + units.offset)
        hidden = bind(vectors.load(self.grad, own, number) + vectors.load(through, local, number))
        state = hidden
        if of.kind == "lstm":
            state = self._slope(5, units) * hidden + vectors.load(cell, local, number)
            if self.cells is not None:
                state = state + vectors.load(self.cells, own, number)
            state = bind(state)
            self._store(3, units, self._slope(3, units) * hidden)
            vectors.store(cell, local, self._slope(4, units) * state, number)
        elif of.kind.startswith("gru"):
            vectors.store(through, local, self._slope(3, units) * state, number)
        for part in range(1 if self.is_reset else 0, min(3, of.gates)):
            self._store(part, units, self._slope(part, units) * state)
        if self.keeps_states:
            vectors.store(self.states, own, state, number)

    def _reset(self, units: Units, through: tirx.Buffer, reset: tirx.Buffer) -> None:
        """Emit the gradients through the reset state of a GRU that resets first."""
        vectors, local, number = self.vectors, units.local(self.weight.pitch), units.number
        grad = bind(vectors.load(reset, local, number))
        self._store(0, units, self._slope(0, units) * grad)
        kept = self._slope(4, units) * grad
        vectors.store(through, local, vectors.load(through, local, number) + kept, number)

    def _slope(self, part: int, units: Units) -> tirx.PrimExpr:
        at = units.at(self.of.slopes, self.of.size, part)
        return self.vectors.load(self.slopes, at, units.number)

    def _store(self, part: int, units: Units, value: tirx.PrimExpr) -> None:
        """Emit the stores of the gradient of a gate."""
        value, size = bind(value), self.of.size
        self.vectors.store(self.gates, units.at(self.of.gates, size, part), value, units.number)
        if self.read:
            product, own = divmod(part, 2) if self.is_reset else (0, part)
            column = bind(units.offset + own * size)
            self.read[product].store(units.row, column, value, units.number)
