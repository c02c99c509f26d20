"""The forward pass of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from ..language import builder as b
from ..language.builder import Extent, bind, const
from ._parts import Rows
from ._pass import Pass, Units
from .gates import sigmoid, tanh
from .plan import RecurrentPlan


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """The values of a task.

    Attributes
    ----------
    sums : tirx.Buffer
        The products of a step.
    state : Rows
        The states.
    cell : tirx.Buffer, optional
        The cells of an LSTM.
    """

    sums: tirx.Buffer
    state: Rows
    cell: tirx.Buffer | None = None


@dataclass(frozen=True, kw_only=True)
class _ResetMemory(_Memory):
    """The values of a task of a GRU that resets first.

    Attributes
    ----------
    reset : Rows
        The reset states.
    kept : tirx.Buffer
        The gates z.
    """

    reset: Rows
    kept: tirx.Buffer


class Forward(Pass):
    """The forward pass of a layer.

    Parameters
    ----------
    inputs, results : Sequence[tirx.Buffer]
        The tensors of the operator.
    unread : Sequence[int]
        The indices of results that are not written.
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
        self.inputs, self.results, self.unread = list(inputs), list(results), unread

    def _block(self, first: Extent, rows: Extent) -> None:
        of, memory = self.of, self._memory(first, rows)
        kinds = {"lstm": self._lstm, "gru": self._gru, "gru_reset": self._gates}
        step: Callable = kinds.get(of.kind, self._rnn)
        with b.serial(0, of.steps) as t:
            start = bind(t * of.batch + first)
            self.weights[0].multiply(memory.state.left(), memory.sums, rows, add=False)
            self._each(start, rows, partial(step, memory=memory))
            if isinstance(memory, _ResetMemory):
                self.weights[1].multiply(memory.reset.left(), memory.sums, rows, add=False)
                self._each(start, rows, partial(self._reset, memory=memory))

    def _memory(self, first: Extent, rows: Extent) -> _Memory:
        """Allocate the values of a task, and copy the initial states."""
        of, size, count = self.of, self.of.size, self.plan.rows
        state = self._rows(size, exact=of.kind.startswith("gru"))
        sums = b.scratch(count * self.plan.pitch)
        state.begin(self.inputs[1], bind(first * size), rows)
        if of.kind == "lstm":
            cell = b.scratch(count * size)
            b.copy(cell, const(0), self.inputs[2], bind(first * size), rows * size)
            return _Memory(sums=sums, state=state, cell=cell)
        if of.resets_first:
            reset = self._rows(size)
            kept = b.scratch(count * size)
            return _ResetMemory(sums=sums, state=state, reset=reset, kept=kept)
        return _Memory(sums=sums, state=state)

    def _sum(self, units: Units, memory: _Memory, gate: int) -> tirx.PrimExpr:
        """Return the products of a gate with the state."""
        at = units.local(self.plan.pitch, gate * self.of.size)
        return self.vectors.load(memory.sums, at, units.number)

    def _data(self, units: Units, gate: int) -> tirx.PrimExpr:
        """Return the products of a gate with the data."""
        return self._load(self.inputs[0], units, self.of.gates, gate)

    def _total(self, units: Units, memory: _Memory, gate: int) -> tirx.PrimExpr:
        """Return a gate before its activation."""
        return bind(self._data(units, gate) + self._sum(units, memory, gate))

    def _store(self, result: int, units: Units, value: tirx.PrimExpr) -> None:
        """Emit the store of a result of one value for each unit."""
        self._store_parts(result, units, {0: value}, 1)

    def _store_parts(
        self, result: int, units: Units, values: dict[int, tirx.PrimExpr], parts: int
    ) -> None:
        """Emit the stores of parts of a result."""
        if result in self.unread:
            return
        for part, value in values.items():
            self._put(self.results[result], units, value, parts, part)

    def _lstm(self, units: Units, memory: _Memory) -> None:
        vectors, one, number = self.vectors, self.vectors.splat(1.0), units.number
        total = [self._total(units, memory, gate) for gate in range(4)]
        i, f, o = (sigmoid(self.vectors, total[gate]) for gate in (0, 1, 3))
        g = tanh(self.vectors, total[2])
        local = units.local(self.of.size)
        last = bind(vectors.load(memory.cell, local, number))
        new = bind(f * last + i * g)
        m = tanh(self.vectors, new)
        hidden = bind(o * m)
        memory.state.store(units.row, units.offset, hidden, number)
        vectors.store(memory.cell, local, new, number)
        self._store(0, units, hidden)
        self._store(1, units, new)
        slopes = [
            g * (i * (one - i)),
            last * (f * (one - f)),
            i * (one - g * g),
            m * (o * (one - o)),
            f,
            o * (one - m * m),
        ]
        self._store_parts(2, units, dict(enumerate(slopes)), 6)

    def _gru(self, units: Units, memory: _Memory) -> None:
        one = self.vectors.splat(1.0)
        data = [self._data(units, gate) for gate in range(3)]
        product = [self._sum(units, memory, gate) for gate in range(3)]
        r, z = (sigmoid(self.vectors, bind(data[gate] + product[gate])) for gate in range(2))
        kept = bind(product[2] + self.vectors.load(self.inputs[3], units.offset, units.number))
        n = tanh(self.vectors, bind(data[2] + r * kept))
        last, rest, hidden = self._mixed(units, memory, n, z)
        slope = bind(rest * (one - n * n))
        self._keep(units, memory, hidden)
        self._store(2, units, slope)
        slopes = [slope * kept * (r * (one - r)), (last - n) * (z * rest), slope * r, z]
        self._store_parts(1, units, dict(enumerate(slopes)), 4)

    def _gates(self, units: Units, memory: _ResetMemory) -> None:
        """Emit the gates r and z of a GRU that resets first, and the reset state."""
        one, number = self.vectors.splat(1.0), units.number
        r, z = (sigmoid(self.vectors, self._total(units, memory, gate)) for gate in range(2))
        last = bind(memory.state.load(units.row, units.offset, number))
        memory.reset.store(units.row, units.offset, r * last, number)
        self.vectors.store(memory.kept, units.local(self.of.size), z, number)
        self._store_parts(1, units, {0: last * (r * (one - r)), 3: z, 4: r}, 5)

    def _reset(self, units: Units, memory: _ResetMemory) -> None:
        """Emit the gate n of a GRU that resets first, and the new state."""
        one = self.vectors.splat(1.0)
        at = units.local(self.plan.weights[1].pitch)
        product = self.vectors.load(memory.sums, at, units.number)
        n = tanh(self.vectors, bind(self._data(units, 2) + product))
        z = bind(self.vectors.load(memory.kept, units.local(self.of.size), units.number))
        last, rest, hidden = self._mixed(units, memory, n, z)
        self._keep(units, memory, hidden)
        self._store_parts(1, units, {1: (last - n) * (z * rest), 2: rest * (one - n * n)}, 5)

    def _mixed(self, units: Units, memory: _Memory, n: tirx.PrimExpr, z: tirx.PrimExpr) -> tuple:
        """Return the last state of a GRU, the share of n, and the new state."""
        last = bind(memory.state.load(units.row, units.offset, units.number))
        rest = bind(self.vectors.splat(1.0) - z)
        return last, rest, bind(rest * n + z * last)

    def _keep(self, units: Units, memory: _Memory, hidden: tirx.PrimExpr) -> None:
        """Emit the stores of a new state, for the next step and as the result."""
        memory.state.store(units.row, units.offset, hidden, units.number)
        self._store(0, units, hidden)

    def _rnn(self, units: Units, memory: _Memory) -> None:
        total = self._total(units, memory, 0)
        if self.of.kind == "rnn_tanh":
            hidden = tanh(self.vectors, total)
        else:
            # With the operands in this order, a NaN propagates.
            hidden = bind(tirx.Max(self.vectors.splat(0.0), total))
        self._keep(units, memory, hidden)
