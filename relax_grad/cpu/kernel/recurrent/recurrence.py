"""The recurrences of recurrent layers over time, and their gradient.

The weight is packed into panels once. A task computes all steps of a block of sequences, so that no
thread waits for another one between two steps, and the states of the block stay in its cache.

In half precision, states, sums and gradients of states are carried in float32 from step to step,
and rounded once where they are results. Where the processor multiplies pairs or tiles (AMX) of
bfloat16, the first factors of the products with the weight are rounded too: the states, and the
gradients of the gates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, Vectors, bind, const
from ..language.halves import Half, Tensor
from ..language.statements import Emit
from ._parts import Factors, Rows, Tasks, TiledWeight, Weight, factors_of
from .gates import sigmoid, tanh

#: The numbers of slopes and gates of each unit, by the name of the layer.
PARTS = {"lstm": (6, 4), "gru": (4, 3), "gru_reset": (5, 3), "rnn": (1, 1)}


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer. The numbers of steps and sequences may be symbolic (int32).

    Attributes
    ----------
    kind : str
        ``"lstm"``, ``"gru"``, ``"gru_reset"`` (the state is reset before the product),
        ``"rnn_tanh"`` or ``"rnn_relu"``; for the gradient also ``"rnn"``.
    steps, batch : int or tirx.PrimExpr
        The extents.
    size : int
        The number of units.
    """

    kind: str
    steps: Extent
    batch: Extent
    size: int

    @property
    def gates(self) -> int:
        return self._parts[1]

    @property
    def slopes(self) -> int:
        return self._parts[0]

    @property
    def _parts(self) -> tuple[int, int]:
        return PARTS["rnn" if self.kind.startswith("rnn") else self.kind]

    def shape(self, parts: int = 1) -> list[Extent]:
        """Return the shape of values of each step."""
        return [self.steps, self.batch, parts * self.size]

    def initial(self) -> list[Extent]:
        return [self.batch, self.size]

    def weight(self) -> list[int]:
        return [self.gates * self.size, self.size]


def recurrence(of: Layer, cpu: CPU, *, unread: Sequence[int] = ()) -> tirx.PrimFunc:
    """Return the kernel of a layer.

    Parameters
    ----------
    of : Layer
        The sizes.
    cpu : CPU
        The target CPU.
    unread : Sequence[int]
        The indices of the results that the kernel does not write: most of its memory traffic is
        for the slopes, which only gradients read.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the arguments of the operator of this name, and its results.
    """
    names, shapes = ["data", "hidden"], [of.shape(of.gates), of.initial()]
    if of.kind == "lstm":
        names, shapes = [*names, "cell"], [*shapes, of.initial()]
    names, shapes = [*names, "weight"], [*shapes, of.weight()]
    if of.kind == "gru":
        names, shapes = [*names, "bias"], [*shapes, [of.size]]
    count = len(names)
    results = {
        "lstm": [of.shape(), of.shape(), of.shape(6)],
        "gru": [of.shape(), of.shape(4), of.shape()],
        "gru_reset": [of.shape(), of.shape(5)],
    }.get(of.kind, [of.shape()])
    names += [f"result{i}" for i in range(len(results))]

    def body(*tensors: Tensor) -> None:
        with factors_of(cpu, tensors[3 if of.kind == "lstm" else 2], tensors[count]) as factors:
            _Forward(of, cpu, factors, tensors[:count], tensors[count:], unread).emit()

    return b.prim_func(of.kind, b.floats(names, [*shapes, *results]), body)


def recurrent_backward(
    of: Layer, cpu: CPU, *, has_cells_grad: bool = False, unread: Sequence[int] = ()
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of a layer.

    Parameters
    ----------
    of : Layer
        The sizes.
    cpu : CPU
        The target CPU.
    has_cells_grad : bool
        Whether there is a gradient with respect to the cells of an LSTM.
    unread : Sequence[int]
        The indices of results that nothing reads. Those of the states are not written.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the arguments of ``relax.grad.recurrent_backward``, and its results.
    """
    names = ["output_grad", "slopes", "weight", *(["cells_grad"] if has_cells_grad else [])]
    shapes = [of.shape(), of.shape(of.slopes), of.weight()]
    shapes += [of.shape()] if has_cells_grad else []
    count = len(names)
    names += ["gates", "states", "hidden", *(["cell"] if of.kind == "lstm" else [])]
    shapes += [of.shape(of.gates), of.shape()]
    shapes += [of.initial()] * (2 if of.kind == "lstm" else 1)

    def body(*tensors: Tensor) -> None:
        with factors_of(cpu, tensors[2], tensors[count]) as factors:
            _Backward(of, cpu, factors, tensors[:count], tensors[count:], unread).emit()

    return b.prim_func("recurrent_backward", b.floats(names, shapes), body)


def previous_steps(shape: Sequence[Extent]) -> tirx.PrimFunc:
    """Return the kernel that moves values to the next step, with initial ones before them.

    Parameters
    ----------
    shape : Sequence[int or tirx.PrimExpr]
        The shape of the values: the steps, and the extents of a step.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the arguments of ``relax.grad.previous_steps``, and its result.
    """
    steps, *own = shape

    def body(data: Tensor, initial: Tensor, result: Tensor) -> None:
        size = b.count(own)
        with b.parallel(0, steps) as t:
            b.either(
                t > 0,
                lambda: b.copy(result, bind(t * size), data, bind((t - 1) * size), size),
                lambda: b.copy(result, const(0), initial, const(0), size),
            )

    return b.prim_func(
        "previous_steps", b.floats(["data", "initial", "result"], [shape, own, shape]), body
    )


class _Pass(ABC):
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
        return Weight(cpu, columns, depth, is_turned, self.tasks.rows, start, pairs=pairs)

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


class _Forward(_Pass):
    def __init__(
        self,
        of: Layer,
        cpu: CPU,
        factors: Factors,
        inputs: Sequence,
        results: Sequence,
        unread: Sequence[int],
    ):
        super().__init__(of, cpu, factors, inputs[3 if of.kind == "lstm" else 2], is_turned=True)
        self.inputs, self.results, self.unread = list(inputs), list(results), unread

    def _block(self, first: Extent, rows: Extent) -> None:
        of, size, count = self.of, self.of.size, self.tasks.rows
        is_gru = of.kind.startswith("gru")
        state = self._rows(size, exact=is_gru)
        sums = b.scratch(count * self.weight.pitch)
        state.begin(self.inputs[1], bind(first * size), rows)
        other: Any = None
        if of.kind == "lstm":
            other = b.scratch(count * size)
            b.copy(other, const(0), self.inputs[2], bind(first * size), rows * size)
        elif self.is_reset:
            other = self._rows(size)
            self.kept = b.scratch(count * size)
        step = {"lstm": self._lstm, "gru": self._gru, "gru_reset": self._gates}.get(
            of.kind, self._rnn
        )
        with b.serial(0, of.steps) as t:
            start = bind(t * of.batch + first)

            def each(step: Callable, start: Extent = start) -> None:
                self.tasks.each_vector(
                    rows,
                    lambda row, offset, number: step(
                        bind(start + row), row, offset, number, sums, state, other
                    ),
                )

            self.weight.multiply(state.left(), sums, rows, add=False)
            each(step)
            if self.is_reset:
                self.last.multiply(other.left(), sums, rows, add=False)
                each(self._reset)

    def _sum(
        self,
        sums: tirx.Buffer,
        row: Extent,
        offset: Extent,
        gate: int,
        number: Extent | None,
        pitch: int | None = None,
    ) -> tirx.PrimExpr:
        pitch = self.weight.pitch if pitch is None else pitch
        return self.vectors.load(sums, bind(row * pitch + offset + gate * self.of.size), number)

    def _data(
        self, place: Extent, offset: Extent, gate: int, number: Extent | None
    ) -> tirx.PrimExpr:
        of = self.of
        at = bind(place * (of.gates * of.size) + offset + gate * of.size)
        return self.vectors.load(self.inputs[0], at, number)

    def _store(
        self,
        result: int,
        place: Extent,
        offset: Extent,
        value: tirx.PrimExpr,
        number: Extent | None,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        if result in self.unread:
            return
        size = self.of.size
        at = bind(place * (parts * size) + offset + part * size)
        self.vectors.store(self.results[result], at, value, number)

    def _lstm(
        self,
        place: Extent,
        row: Extent,
        offset: Extent,
        number: Extent | None,
        sums: tirx.Buffer,
        state: Rows,
        cell: tirx.Buffer,
    ) -> None:
        vectors, one = self.vectors, self.vectors.splat(1.0)
        total = [
            bind(
                self._data(place, offset, gate, number) + self._sum(sums, row, offset, gate, number)
            )
            for gate in range(4)
        ]
        i, f, o = (sigmoid(self.vectors, total[gate]) for gate in (0, 1, 3))
        g = tanh(self.vectors, total[2])
        local = bind(row * self.of.size + offset)
        last = bind(vectors.load(cell, local, number))
        new = bind(f * last + i * g)
        m = tanh(self.vectors, new)
        hidden = bind(o * m)
        state.store(row, offset, hidden, number)
        vectors.store(cell, local, new, number)
        self._store(0, place, offset, hidden, number)
        self._store(1, place, offset, new, number)
        slopes = [
            g * (i * (one - i)),
            last * (f * (one - f)),
            i * (one - g * g),
            m * (o * (one - o)),
            f,
            o * (one - m * m),
        ]
        for part, value in enumerate(slopes):
            self._store(2, place, offset, value, number, part, 6)

    def _gru(
        self,
        place: Extent,
        row: Extent,
        offset: Extent,
        number: Extent | None,
        sums: tirx.Buffer,
        state: Rows,
        _: object,
    ) -> None:
        vectors, one = self.vectors, self.vectors.splat(1.0)
        data = [self._data(place, offset, gate, number) for gate in range(3)]
        product = [self._sum(sums, row, offset, gate, number) for gate in range(3)]
        r, z = (sigmoid(self.vectors, bind(data[gate] + product[gate])) for gate in range(2))
        kept = bind(product[2] + vectors.load(self.inputs[3], offset, number))
        n = tanh(self.vectors, bind(data[2] + r * kept))
        last = bind(state.load(row, offset, number))
        rest = bind(one - z)
        hidden = bind(rest * n + z * last)
        slope = bind(rest * (one - n * n))
        state.store(row, offset, hidden, number)
        self._store(0, place, offset, hidden, number)
        self._store(2, place, offset, slope, number)
        slopes = [slope * kept * (r * (one - r)), (last - n) * (z * rest), slope * r, z]
        for part, value in enumerate(slopes):
            self._store(1, place, offset, value, number, part, 4)

    def _gates(
        self,
        place: Extent,
        row: Extent,
        offset: Extent,
        number: Extent | None,
        sums: tirx.Buffer,
        state: Rows,
        reset: Rows,
    ) -> None:
        """Emit the gates r and z of a GRU that resets first, and the reset state."""
        one = self.vectors.splat(1.0)
        r, z = (
            sigmoid(
                self.vectors,
                bind(
                    self._data(place, offset, gate, number)
                    + self._sum(sums, row, offset, gate, number)
                ),
            )
            for gate in range(2)
        )
        last = bind(state.load(row, offset, number))
        reset.store(row, offset, r * last, number)
        self.vectors.store(self.kept, bind(row * self.of.size + offset), z, number)
        for part, value in {0: last * (r * (one - r)), 3: z, 4: r}.items():
            self._store(1, place, offset, value, number, part, 5)

    def _reset(
        self,
        place: Extent,
        row: Extent,
        offset: Extent,
        number: Extent | None,
        sums: tirx.Buffer,
        state: Rows,
        _: object,
    ) -> None:
        """Emit the gate n of a GRU that resets first, and the new state."""
        one = self.vectors.splat(1.0)
        product = self._sum(sums, row, offset, 0, number, self.last.pitch)
        n = tanh(self.vectors, bind(self._data(place, offset, 2, number) + product))
        z = bind(self.vectors.load(self.kept, bind(row * self.of.size + offset), number))
        last = bind(state.load(row, offset, number))
        rest = bind(one - z)
        hidden = bind(rest * n + z * last)
        state.store(row, offset, hidden, number)
        self._store(0, place, offset, hidden, number)
        for part, value in {1: (last - n) * (z * rest), 2: rest * (one - n * n)}.items():
            self._store(1, place, offset, value, number, part, 5)

    def _rnn(
        self,
        place: Extent,
        row: Extent,
        offset: Extent,
        number: Extent | None,
        sums: tirx.Buffer,
        state: Rows,
        _: object,
    ) -> None:
        total = bind(self._data(place, offset, 0, number) + self._sum(sums, row, offset, 0, number))
        if self.of.kind == "rnn_tanh":
            hidden = tanh(self.vectors, total)
        else:
            # With the operands in this order, a NaN propagates.
            hidden = bind(tirx.Max(self.vectors.splat(0.0), total))
        state.store(row, offset, hidden, number)
        self._store(0, place, offset, hidden, number)


class _Backward(_Pass):
    def __init__(
        self,
        of: Layer,
        cpu: CPU,
        factors: Factors,
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

            def each(emit: Emit, other: tirx.Buffer | None, start: Extent = start) -> None:
                self.tasks.each_vector(
                    rows,
                    lambda row, offset, number: emit(
                        bind(start + row), row, offset, number, through, other
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

    def _unit(
        self,
        place: Extent,
        row: Extent,
        offset: Extent,
        number: Extent | None,
        through: tirx.Buffer,
        cell: tirx.Buffer | None,
    ) -> None:
        of, vectors = self.of, self.vectors
        local = bind(row * self.weight.pitch + offset)

        def slope(part: int) -> tirx.PrimExpr:
            return self._slope(part, place, offset, number)

        def store(part: int, value: tirx.PrimExpr) -> None:
            self._store(part, place, row, offset, number, value)

        own = bind(place * of.size + offset)
        hidden = bind(vectors.load(self.grad, own, number) + vectors.load(through, local, number))
        state = hidden
        if of.kind == "lstm":
            state = slope(5) * hidden + vectors.load(cell, local, number)
            if self.cells is not None:
                state = state + vectors.load(self.cells, own, number)
            state = bind(state)
            store(3, slope(3) * hidden)
            vectors.store(cell, local, slope(4) * state, number)
        elif of.kind.startswith("gru"):
            vectors.store(through, local, slope(3) * state, number)
        for part in range(1 if self.is_reset else 0, min(3, of.gates)):
            store(part, slope(part) * state)
        if self.keeps_states:
            vectors.store(self.states, own, state, number)

    def _reset(
        self,
        place: Extent,
        row: Extent,
        offset: Extent,
        number: Extent | None,
        through: tirx.Buffer,
        reset: tirx.Buffer,
    ) -> None:
        """Emit the gradients through the reset state of a GRU that resets first."""
        vectors, local = self.vectors, bind(row * self.weight.pitch + offset)
        grad = bind(vectors.load(reset, local, number))
        self._store(0, place, row, offset, number, self._slope(0, place, offset, number) * grad)
        kept = self._slope(4, place, offset, number) * grad
        vectors.store(through, local, vectors.load(through, local, number) + kept, number)

    def _slope(
        self, part: int, place: Extent, offset: Extent, number: Extent | None
    ) -> tirx.PrimExpr:
        at = bind(place * (self.of.slopes * self.of.size) + offset + part * self.of.size)
        return self.vectors.load(self.slopes, at, number)

    def _store(
        self,
        part: int,
        place: Extent,
        row: Extent,
        offset: Extent,
        number: Extent | None,
        value: tirx.PrimExpr,
    ) -> None:
        value, size = bind(value), self.of.size
        at = bind(place * (self.of.gates * size) + offset + part * size)
        self.vectors.store(self.gates, at, value, number)
        if self.read:
            product, own = divmod(part, 2) if self.is_reset else (0, part)
            self.read[product].store(row, bind(offset + own * size), value, number)
