"""The backward pass of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, bind, const
from ..language.halves import Half
from ._parts import Rows
from ._pass import Pass, Units
from .plan import RecurrentPlan


class Backward(Pass):
    """The backward pass of a layer.

    Parameters
    ----------
    inputs, results : Sequence[tirx.Buffer]
        The tensors of the operator.
    unread : Sequence[int]
        The indices of results that nothing reads.
    plan, weight
        As for :class:`Pass`.
    """

    def __init__(
        self,
        plan: RecurrentPlan,
        weight: tirx.Buffer,
        *,
        inputs: Sequence,
        results: Sequence,
        unread: Sequence[int],
    ):
        super().__init__(plan, weight)
        self.grad, self.slopes, _, *cells = inputs
        self.keeps_states = 1 not in unread
        self.cells = cells[0] if cells else None
        self.gates, self.states, *self.initial = results

    def _block(self, first: Extent, rows: Extent) -> None:
        of, size, pitch, count = self.of, self.of.size, self.plan.pitch, self.plan.rows
        # The gradients of the states before a step, through this step.
        through = b.scratch(count * pitch)
        b.clear(through, const(0), count * pitch)
        cell = None
        if of.kind == "lstm":
            cell = b.scratch(count * pitch)
            b.clear(cell, const(0), count * pitch)
        width = of.gates * size
        #: The gradients of the gates of a step that each product reads; none: they are the result.
        self.read: list[Rows] = []
        if isinstance(self.gates, Half):
            sizes = [2 * size, size] if of.resets_first else [width]
            self.read = [self._rows(each) for each in sizes]
        reset = b.scratch(count * pitch) if of.resets_first else None
        with b.serial(0, of.steps) as step:
            start = bind((of.steps - 1 - step) * of.batch + first)

            def left(product: int = 0, start: Extent = start) -> tuple:
                if self.read:
                    return self.read[product].left()
                return self.gates, bind(start * width + 2 * size * product), width

            self._each(start, rows, partial(self._unit, through=through, cell=cell))
            if of.resets_first:
                self.weights[1].multiply(left(1), reset, rows, add=False)
                self._each(start, rows, partial(self._reset, through=through, reset=reset))
            self.weights[0].multiply(left(), through, rows, add=of.kind.startswith("gru"))
        for target, source in zip(self.initial, (through, cell), strict=False):
            with b.serial(0, rows) as row:
                b.copy(target, bind((first + row) * size), source, bind(row * pitch), const(size))

    def _unit(self, units: Units, through: tirx.Buffer, cell: tirx.Buffer | None) -> None:
        """Emit the gradients of the gates; ``cell`` has the gradients of an LSTM's cells."""
        of, vectors, number = self.of, self.vectors, units.number
        local = units.local(self.plan.pitch)
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
        for part in range(1 if of.resets_first else 0, min(3, of.gates)):
            self._store(part, units, self._slope(part, units) * state)
        if self.keeps_states:
            vectors.store(self.states, own, state, number)

    def _reset(self, units: Units, through: tirx.Buffer, reset: tirx.Buffer) -> None:
        """Emit the gradients through the reset state of a GRU that resets first."""
        vectors, local, number = self.vectors, units.local(self.plan.pitch), units.number
        grad = bind(vectors.load(reset, local, number))
        self._store(0, units, self._slope(0, units) * grad)
        kept = self._slope(4, units) * grad
        vectors.store(through, local, vectors.load(through, local, number) + kept, number)

    def _slope(self, part: int, units: Units) -> tirx.PrimExpr:
        return self._load(self.slopes, units, self.of.slopes, part)

    def _store(self, part: int, units: Units, value: tirx.PrimExpr) -> None:
        """Emit the stores of the gradient of a gate."""
        value = bind(value)
        self._put(self.gates, units, value, self.of.gates, part)
        if self.read:
            product, own = divmod(part, 2) if self.of.resets_first else (0, part)
            column = bind(units.offset + own * self.of.size)
            self.read[product].store(units.row, column, value, units.number)
