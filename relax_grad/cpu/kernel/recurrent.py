"""The recurrences of recurrent layers over time, and their gradient.

The weight is packed into panels once. A task computes all steps of a block of sequences, so that no
thread waits for another one between two steps, and the states of the block stay in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from ..target import CPU
from . import builder as b
from . import functions as math
from ._panels import Early, Packing
from ._product import Matmul
from ._tile import multiply_add, rows_up_to
from .builder import Extent, Vectors, bind, ceil_div, const

#: The largest number of sequences of a task.
_MOST_ROWS = 32

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


def recurrence(of: Layer, cpu: CPU) -> tirx.PrimFunc:
    """Return the kernel of a layer.

    Parameters
    ----------
    of : Layer
        The sizes.
    cpu : CPU
        The target CPU.

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

    def body(*tensors) -> None:
        _Forward(of, cpu, tensors[:count], tensors[count:]).emit()

    return b.prim_func(of.kind, b.floats(names, [*shapes, *results]), body)


def recurrent_backward(of: Layer, cpu: CPU, *, has_cells_grad: bool = False) -> tirx.PrimFunc:
    """Return the kernel of the gradient of a layer.

    Parameters
    ----------
    of : Layer
        The sizes.
    cpu : CPU
        The target CPU.
    has_cells_grad : bool
        Whether there is a gradient with respect to the cells of an LSTM.

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

    def body(*tensors) -> None:
        _Backward(of, cpu, tensors[:count], tensors[count:]).emit()

    return b.prim_func("recurrent_backward", b.floats(names, shapes), body)


class _Weight:
    """A packed matrix, ``[panel][k][width]``, padded with zeros, and its products with rows.

    Parameters
    ----------
    columns, depth : int
        The extents of the matrix.
    start : int
        Its offset in the buffer.
    is_turned : bool
        Whether the matrix is stored as ``[columns, depth]``.
    rows : int
        The number of rows of a tile.
    """

    def __init__(
        self, cpu: CPU, columns: int, depth: int, is_turned: bool, rows: int, start: int = 0
    ):
        self._vectors, self._tile = Vectors(cpu.lanes), (rows, 2)
        matrix = Matmul(1, columns, depth, transpose_b=is_turned)
        self._packing = Packing(matrix, self._vectors, 2)
        self._depth, self._width, self._start = depth, self._packing.width, start
        self._panels = ceil_div(columns, self._width)
        #: The stride of the rows of a product.
        self.pitch = self._panels * self._width

    def pack(self, source: tirx.Buffer) -> None:
        """Emit the copy of the matrix."""
        self._packed = Early(self._packing, source, const(self._start), b.parallel).panels

    def multiply(self, left: tuple, target: tirx.Buffer, rows, *, add: bool) -> None:
        """Emit the products of rows and the matrix.

        ``left`` is a buffer, the offset of the first row in it, and the stride of the rows.
        ``target`` has rows of :attr:`pitch`.
        """
        buffer, start, step = left
        height, lanes, width = self._tile[0], self._vectors.lanes, self._width
        with b.serial(0, self._panels) as j, b.serial(0, bind(ceil_div(rows, height))) as strip:
            first, base = bind(strip * height), bind(j * (self._depth * width))
            offsets = rows_up_to(first, height, rows)
            sources = [bind(start + (first + i) * step) for i in offsets]
            targets = [bind((first + i) * self.pitch + j * width) for i in offsets]
            multiply_add(
                self._vectors,
                self._tile,
                self._depth,
                lambda i, k: buffer[sources[i] + k],
                lambda k, v: self._vectors.load(self._packed, base + k * width + v * lanes),
                lambda i, v: (target, targets[i] + v * lanes, None),
                add=add,
            )


class _Tasks:
    """Blocks of sequences.

    Attributes
    ----------
    height : int
        The number of rows of a tile.
    rows : int
        The number of sequences of a task.
    """

    def __init__(self, of: Layer, cpu: CPU):
        self.of, self.vectors = of, Vectors(cpu.lanes)
        most = 8 if cpu.registers >= 32 else 6
        rows = 2 * most
        if isinstance(of.batch, int):
            rows = min(ceil_div(of.batch, max(1, cpu.cores)), _MOST_ROWS)
        strips = ceil_div(rows, most)
        self.height = ceil_div(rows, strips)
        self.rows = self.height * strips

    def each(self, emit: Callable) -> None:
        """Emit ``emit(first, rows)`` for each block."""
        with b.parallel(0, ceil_div(self.of.batch, self.rows)) as task:
            first = bind(task * self.rows)
            emit(first, bind(tirx.min(const(self.rows), self.of.batch - first)))

    def each_vector(self, rows, emit: Callable) -> None:
        """Emit ``emit(row, offset, number)`` for each vector of the units of each sequence of a
        block."""
        with b.serial(0, rows) as row:
            self.vectors.each(self.of.size, lambda offset, number: emit(row, offset, number))


class _Forward:
    def __init__(self, of: Layer, cpu: CPU, inputs: Sequence, results: Sequence):
        self.of, self.tasks, self.vectors = of, _Tasks(of, cpu), Vectors(cpu.lanes)
        self.inputs, self.results = list(inputs), list(results)
        self.source = self.inputs[3 if of.kind == "lstm" else 2]
        size, height = of.size, self.tasks.height
        # The gate n of a GRU that resets first has a product of its own.
        self.is_reset = of.kind == "gru_reset"
        together = 2 if self.is_reset else of.gates
        self.weight = _Weight(cpu, together * size, size, True, height)
        self.last = _Weight(cpu, size, size, True, height, together * size * size)

    def emit(self) -> None:
        self.weight.pack(self.source)
        if self.is_reset:
            self.last.pack(self.source)
        self.tasks.each(self._block)

    def _block(self, first, rows) -> None:
        of, size = self.of, self.of.size
        state = b.scratch(self.tasks.rows * size)
        cell = b.scratch(self.tasks.rows * size) if of.kind == "lstm" else None
        sums = b.scratch(self.tasks.rows * self.weight.pitch)
        b.copy(state, const(0), self.inputs[1], bind(first * size), rows * size)
        if cell is not None:
            b.copy(cell, const(0), self.inputs[2], bind(first * size), rows * size)
        reset = b.scratch(self.tasks.rows * size) if self.is_reset else None
        step = {"lstm": self._lstm, "gru": self._gru, "gru_reset": self._gates}.get(
            of.kind, self._rnn
        )
        with b.serial(0, of.steps) as t:
            start = bind(t * of.batch + first)

            def each(step: Callable, other, start=start) -> None:
                def unit(row, offset, number) -> None:
                    local = bind(row * size + offset)
                    step(bind(start + row), row, offset, number, local, sums, state, other)

                self.tasks.each_vector(rows, unit)

            self.weight.multiply((state, const(0), size), sums, rows, add=False)
            each(step, reset if self.is_reset else cell)
            if self.is_reset:
                self.last.multiply((reset, const(0), size), sums, rows, add=False)
                each(self._reset, reset)

    def _sum(self, sums, row, offset, gate: int, number, pitch: int | None = None):
        pitch = self.weight.pitch if pitch is None else pitch
        return self.vectors.load(sums, bind(row * pitch + offset + gate * self.of.size), number)

    def _data(self, place, offset, gate: int, number):
        of = self.of
        at = bind(place * (of.gates * of.size) + offset + gate * of.size)
        return self.vectors.load(self.inputs[0], at, number)

    def _sigmoid(self, x):
        return self._held(math.sigmoid(x))

    def _tanh(self, x):
        return self._held(math.tanh(x))

    def _held(self, value):
        """Return a vector by way of a buffer, which LLVM keeps in a register.

        TVM's simplifier visits both cases of a bound Select at every use of the variable, and those
        within them.
        """
        row = b.scratch(self.vectors.lanes)
        self.vectors.store(row, const(0), value)
        return bind(self.vectors.load(row, const(0)))

    def _store(self, result: int, place, offset, value, number, part: int = 0, parts: int = 1):
        size = self.of.size
        at = bind(place * (parts * size) + offset + part * size)
        self.vectors.store(self.results[result], at, value, number)

    def _lstm(self, place, row, offset, number, local, sums, state, cell) -> None:
        vectors, one = self.vectors, self.vectors.splat(1.0)
        total = [
            bind(
                self._data(place, offset, gate, number) + self._sum(sums, row, offset, gate, number)
            )
            for gate in range(4)
        ]
        i, f, o = (self._sigmoid(total[gate]) for gate in (0, 1, 3))
        g = self._tanh(total[2])
        last = bind(vectors.load(cell, local, number))
        new = bind(f * last + i * g)
        m = self._tanh(new)
        hidden = bind(o * m)
        for buffer, value in ((state, hidden), (cell, new)):
            vectors.store(buffer, local, value, number)
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

    def _gru(self, place, row, offset, number, local, sums, state, _) -> None:
        vectors, one = self.vectors, self.vectors.splat(1.0)
        data = [self._data(place, offset, gate, number) for gate in range(3)]
        product = [self._sum(sums, row, offset, gate, number) for gate in range(3)]
        r, z = (self._sigmoid(bind(data[gate] + product[gate])) for gate in range(2))
        kept = bind(product[2] + vectors.load(self.inputs[3], offset, number))
        n = self._tanh(bind(data[2] + r * kept))
        last = bind(vectors.load(state, local, number))
        rest = bind(one - z)
        hidden = bind(rest * n + z * last)
        slope = bind(rest * (one - n * n))
        vectors.store(state, local, hidden, number)
        self._store(0, place, offset, hidden, number)
        self._store(2, place, offset, slope, number)
        slopes = [slope * kept * (r * (one - r)), (last - n) * (z * rest), slope * r, z]
        for part, value in enumerate(slopes):
            self._store(1, place, offset, value, number, part, 4)

    def _gates(self, place, row, offset, number, local, sums, state, reset) -> None:
        """Emit the gates r and z of a GRU that resets first, and the reset state."""
        vectors, one = self.vectors, self.vectors.splat(1.0)
        r, z = (
            self._sigmoid(
                bind(
                    self._data(place, offset, gate, number)
                    + self._sum(sums, row, offset, gate, number)
                )
            )
            for gate in range(2)
        )
        last = bind(vectors.load(state, local, number))
        vectors.store(reset, local, r * last, number)
        for part, value in {0: last * (r * (one - r)), 3: z, 4: r}.items():
            self._store(1, place, offset, value, number, part, 5)

    def _reset(self, place, row, offset, number, local, sums, state, _) -> None:
        """Emit the gate n of a GRU that resets first, and the new state."""
        vectors, one = self.vectors, self.vectors.splat(1.0)
        product = self._sum(sums, row, offset, 0, number, self.last.pitch)
        n = self._tanh(bind(self._data(place, offset, 2, number) + product))
        at = bind(place * (5 * self.of.size) + offset + 3 * self.of.size)
        z = bind(vectors.load(self.results[1], at, number))
        last = bind(vectors.load(state, local, number))
        rest = bind(one - z)
        hidden = bind(rest * n + z * last)
        vectors.store(state, local, hidden, number)
        self._store(0, place, offset, hidden, number)
        for part, value in {1: (last - n) * (z * rest), 2: rest * (one - n * n)}.items():
            self._store(1, place, offset, value, number, part, 5)

    def _rnn(self, place, row, offset, number, local, sums, state, _) -> None:
        total = bind(self._data(place, offset, 0, number) + self._sum(sums, row, offset, 0, number))
        if self.of.kind == "rnn_tanh":
            hidden = self._tanh(total)
        else:
            # With the operands in this order, a NaN propagates.
            hidden = bind(tirx.Max(self.vectors.splat(0.0), total))
        self.vectors.store(state, local, hidden, number)
        self._store(0, place, offset, hidden, number)


class _Backward:
    def __init__(self, of: Layer, cpu: CPU, inputs: Sequence, results: Sequence):
        self.of, self.tasks, self.vectors = of, _Tasks(of, cpu), Vectors(cpu.lanes)
        self.grad, self.slopes, self.source, *cells = inputs
        self.cells = cells[0] if cells else None
        self.gates, self.states, *self.initial = results
        size, height = of.size, self.tasks.height
        self.is_reset = of.kind == "gru_reset"
        together = 2 if self.is_reset else of.gates
        self.weight = _Weight(cpu, size, together * size, False, height)
        self.last = _Weight(cpu, size, size, False, height, together * size * size)

    def emit(self) -> None:
        self.weight.pack(self.source)
        if self.is_reset:
            self.last.pack(self.source)
        self.tasks.each(self._block)

    def _block(self, first, rows) -> None:
        of, size, pitch = self.of, self.of.size, self.weight.pitch
        # The gradients of the states before a step, through this step.
        through = b.scratch(self.tasks.rows * pitch)
        b.clear(through, const(0), self.tasks.rows * pitch)
        cell = None
        if of.kind == "lstm":
            cell = b.scratch(self.tasks.rows * pitch)
            b.clear(cell, const(0), self.tasks.rows * pitch)
        width = of.gates * size
        reset = b.scratch(self.tasks.rows * pitch) if self.is_reset else None
        with b.serial(0, of.steps) as step:
            start = bind((of.steps - 1 - step) * of.batch + first)

            def unit(row, offset, number, start=start) -> None:
                self._unit(
                    bind(start + row), bind(row * pitch + offset), offset, number, through, cell
                )

            self.tasks.each_vector(rows, unit)
            left = self.gates, bind(start * width), width
            if self.is_reset:
                of_last = self.gates, bind(start * width + 2 * size), width
                self.last.multiply(of_last, reset, rows, add=False)
                self.tasks.each_vector(
                    rows,
                    lambda row, offset, number, start=start: self._reset(
                        bind(start + row),
                        bind(row * pitch + offset),
                        offset,
                        number,
                        through,
                        reset,
                    ),
                )
            self.weight.multiply(left, through, rows, add=of.kind.startswith("gru"))
        for target, source in zip(self.initial, (through, cell), strict=False):
            with b.serial(0, rows) as row:
                b.copy(target, bind((first + row) * size), source, bind(row * pitch), const(size))

    def _unit(self, place, local, offset, number, through, cell) -> None:
        of, vectors = self.of, self.vectors

        def slope(part: int):
            return self._slope(part, place, offset, number)

        def store(part: int, value) -> None:
            self._store(part, place, offset, number, value)

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
        vectors.store(self.states, own, state, number)

    def _reset(self, place, local, offset, number, through, reset) -> None:
        """Emit the gradients through the reset state of a GRU that resets first."""
        vectors = self.vectors
        grad = bind(vectors.load(reset, local, number))
        self._store(0, place, offset, number, self._slope(0, place, offset, number) * grad)
        kept = self._slope(4, place, offset, number) * grad
        vectors.store(through, local, vectors.load(through, local, number) + kept, number)

    def _slope(self, part: int, place, offset, number):
        at = bind(place * (self.of.slopes * self.of.size) + offset + part * self.of.size)
        return self.vectors.load(self.slopes, at, number)

    def _store(self, part: int, place, offset, number, value) -> None:
        at = bind(place * (self.of.gates * self.of.size) + offset + part * self.of.size)
        self.vectors.store(self.gates, at, value, number)
