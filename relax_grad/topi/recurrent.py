"""The recurrences of recurrent layers, and of their derivatives, over the steps of a sequence.

A task computes all steps of one sequence, so tasks are independent. The tensors have the dtype to
accumulate in, because each step reads the results of the one before: half precision is cast to
float32 first. The slopes are as in :mod:`relax_grad.op.recurrent`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import te, tirx, topi
from tvm.script.ir_builder import tirx as T

from ._loops import loops, statements, tasks
from .util import Shape, is_empty, is_static, zeros

#: Returns the function from a unit to its state before a step, given the buffers of the states
#: after all steps and of the initial states.
StepStates: TypeAlias = (
    "Callable[[tirx.Buffer, tirx.Buffer], Callable[[tirx.PrimExpr], tirx.PrimExpr]]"
)


def lstm(data: te.Tensor, hidden: te.Tensor, cell: te.Tensor, weight: te.Tensor) -> list[te.Tensor]:
    """Long short-term memory over time, with the gates i, f, g and o.

    Parameters
    ----------
    data : te.Tensor
        The products of the inputs and the input weight, with all biases,
        ``(steps, batch, 4 * size)``.
    hidden, cell : te.Tensor
        The initial states, ``(batch, size)``.
    weight : te.Tensor
        The recurrent weight, ``(4 * size, size)``.

    Returns
    -------
    results : list[te.Tensor]
        The hidden states, the cells, and the slopes.
    """
    steps, batch, _ = data.shape
    size = weight.shape[1]

    def body(
        x: tirx.Buffer,
        h0: tirx.Buffer,
        c0: tirx.Buffer,
        w: tirx.Buffer,
        states: tirx.Buffer,
        cells: tirx.Buffer,
        slopes: tirx.Buffer,
    ) -> None:
        def step(t: tirx.PrimExpr, b: tirx.PrimExpr, before_in: StepStates) -> None:
            before = before_in(states, h0)
            _sums(slopes, x, w, before, (t, b), rows=4 * size, size=size)
            with loops([size]) as (j,):
                parts = [T.bind(slopes[t, b, j + size * gate]) for gate in range(4)]
                i, f, o = (T.bind(_sigmoid(parts[gate])) for gate in (0, 1, 3))
                g = T.bind(tirx.tanh(parts[2]))
                last = T.bind(before_in(cells, c0)(j))
                new = T.bind(f * last + i * g)
                m = T.bind(tirx.tanh(new))
                T.buffer_store(cells, new, [t, b, j])
                T.buffer_store(states, o * m, [t, b, j])
                derivatives = [
                    g * i * (1 - i),
                    last * f * (1 - f),
                    i * (1 - g * g),
                    m * o * (1 - o),
                    f,
                    o * (1 - m * m),
                ]
                for part, value in enumerate(derivatives):
                    T.buffer_store(slopes, value, [t, b, j + size * part])

        _each_step(batch, steps, step)

    states = [steps, batch, size]
    shapes = [states, states, [steps, batch, 6 * size]]
    return _made(body, [data, hidden, cell, weight], shapes, "lstm")


def gru(
    data: te.Tensor, hidden: te.Tensor, weight: te.Tensor, bias: te.Tensor | None
) -> list[te.Tensor]:
    """Gated recurrent unit over time, with the gates r, z and n.

    Parameters
    ----------
    data : te.Tensor
        The products of the inputs and the input weight, ``(steps, batch, 3 * size)``.
    hidden : te.Tensor
        The initial state, ``(batch, size)``.
    weight : te.Tensor
        The recurrent weight, ``(3 * size, size)``.
    bias : te.Tensor or None
        The recurrent bias of the gate n, ``(size,)``. None if the gate r resets the state before
        the product.

    Returns
    -------
    results : list[te.Tensor]
        The hidden states, the slopes, and, with a bias, the slopes of the hidden states by the data
        of the gate n.
    """
    if bias is None:
        return _gru_that_resets_first(data, hidden, weight)
    steps, batch, _ = data.shape
    size = weight.shape[1]

    def body(
        x: tirx.Buffer,
        h0: tirx.Buffer,
        w: tirx.Buffer,
        own: tirx.Buffer,
        states: tirx.Buffer,
        slopes: tirx.Buffer,
        fresh: tirx.Buffer,
    ) -> None:
        def step(t: tirx.PrimExpr, b: tirx.PrimExpr, before_in: StepStates) -> None:
            before = before_in(states, h0)
            _sums(slopes, None, w, before, (t, b), rows=3 * size, size=size)
            with loops([size]) as (j,):
                product = [T.bind(slopes[t, b, j + size * gate]) for gate in range(3)]
                inputs = [T.bind(x[t, b, j + size * gate]) for gate in range(3)]
                r, z = (T.bind(_sigmoid(inputs[gate] + product[gate])) for gate in range(2))
                kept = T.bind(product[2] + own[j])
                n = T.bind(tirx.tanh(inputs[2] + r * kept))
                last = T.bind(before(j))
                T.buffer_store(states, (1 - z) * n + z * last, [t, b, j])
                slope = T.bind((1 - z) * (1 - n * n))
                T.buffer_store(fresh, slope, [t, b, j])
                values = [slope * kept * r * (1 - r), (last - n) * z * (1 - z), slope * r, z]
                for part, value in enumerate(values):
                    T.buffer_store(slopes, value, [t, b, j + size * part])

        _each_step(batch, steps, step)

    states = [steps, batch, size]
    shapes = [states, [steps, batch, 4 * size], states]
    return _made(body, [data, hidden, weight, bias], shapes, "gru")


def _gru_that_resets_first(
    data: te.Tensor, hidden: te.Tensor, weight: te.Tensor
) -> list[te.Tensor]:
    steps, batch, _ = data.shape
    size = weight.shape[1]

    def body(
        x: tirx.Buffer, h0: tirx.Buffer, w: tirx.Buffer, states: tirx.Buffer, slopes: tirx.Buffer
    ) -> None:
        def step(t: tirx.PrimExpr, b: tirx.PrimExpr, before_in: StepStates) -> None:
            before = before_in(states, h0)
            _sums(slopes, x, w, before, (t, b), rows=2 * size, size=size)
            with loops([size]) as (j,):
                r, z = (T.bind(_sigmoid(slopes[t, b, j + size * gate])) for gate in range(2))
                last = T.bind(before(j))
                for part, value in {0: last * r * (1 - r), 3: z, 4: r}.items():
                    T.buffer_store(slopes, value, [t, b, j + size * part])

            def reset(k: tirx.PrimExpr) -> tirx.PrimExpr:
                return slopes[t, b, k + size * 4] * before(k)

            _sums(slopes, x, w, reset, (t, b), rows=size, size=size, first=2 * size)
            with loops([size]) as (j,):
                n = T.bind(tirx.tanh(slopes[t, b, j + size * 2]))
                z, last = T.bind(slopes[t, b, j + size * 3]), T.bind(before(j))
                T.buffer_store(states, (1 - z) * n + z * last, [t, b, j])
                for part, value in {
                    1: (last - n) * z * (1 - z),
                    2: (1 - z) * (1 - n * n),
                }.items():
                    T.buffer_store(slopes, value, [t, b, j + size * part])

        _each_step(batch, steps, step)

    shapes = [[steps, batch, size], [steps, batch, 5 * size]]
    return _made(body, [data, hidden, weight], shapes, "gru")


def rnn(data: te.Tensor, hidden: te.Tensor, weight: te.Tensor, activation: str) -> te.Tensor:
    """Recurrence ``h = activation(data[t] + h @ weight^T)``.

    Parameters
    ----------
    data : te.Tensor
        The products of the inputs and the input weight, ``(steps, batch, size)``.
    hidden : te.Tensor
        The initial state, ``(batch, size)``.
    weight : te.Tensor
        The recurrent weight, ``(size, size)``.
    activation : str
        ``"tanh"`` or ``"relu"``.

    Returns
    -------
    result : te.Tensor
        The hidden states.
    """
    steps, batch, size = data.shape

    def body(x: tirx.Buffer, h0: tirx.Buffer, w: tirx.Buffer, states: tirx.Buffer) -> None:
        def step(t: tirx.PrimExpr, b: tirx.PrimExpr, before_in: StepStates) -> None:
            before = before_in(states, h0)
            _sums(states, x, w, before, (t, b), rows=size, size=size)
            with loops([size]) as (j,):
                total = states[t, b, j]
                # With the operands in this order, a NaN propagates.
                relu = tirx.Max(tirx.const(0, data.dtype), total)
                T.buffer_store(
                    states, tirx.tanh(total) if activation == "tanh" else relu, [t, b, j]
                )

        _each_step(batch, steps, step)

    return _made(body, [data, hidden, weight], [[steps, batch, size]], "rnn")[0]


def recurrent_backward(
    output_grad: te.Tensor,
    slopes: te.Tensor,
    weight: te.Tensor,
    cells_grad: te.Tensor | None,
    parts: int,
) -> list[te.Tensor]:
    """Gradient of the recurrence of a layer, from the last step to the first.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the hidden states, ``(steps, batch, size)``.
    slopes : te.Tensor
        The slopes, ``(steps, batch, parts * size)``.
    weight : te.Tensor
        The recurrent weight, ``(gates * size, size)``.
    cells_grad : te.Tensor or None
        The gradient with respect to the cells of an LSTM.
    parts : int
        The number of slopes of each unit: 6 for an LSTM, 4 for a GRU, 5 for one that resets first,
        1 for an RNN.

    Returns
    -------
    results : list[te.Tensor]
        The gradients with respect to the products with the weight, the cells or hidden states, and
        the initial states.
    """
    steps, batch, size = output_grad.shape
    rows = weight.shape[0]
    zero = tirx.const(0, output_grad.dtype)
    of_lstm, resets = parts == 6, parts == 5
    inputs = [output_grad, slopes, weight, *([] if cells_grad is None else [cells_grad])]

    def body(*buffers: tirx.Buffer) -> None:
        grad, s, w, *cells = buffers[: len(inputs)]
        gates, states, h0, *c0 = buffers[len(inputs) :]

        def slope(at: Sequence[tirx.PrimExpr], part: int, j: tirx.PrimExpr) -> tirx.PrimExpr:
            return s[(*at, j + size * part)]

        with tasks([batch]) as (b,):
            with loops([size]) as (j,):
                for buffer in (h0, *c0):
                    T.buffer_store(buffer, zero, [b, j])
            with loops([steps], reverse=True) as (t,):
                with loops([size]) as (j,):
                    at = t, b
                    through = T.bind(grad[t, b, j] + h0[b, j])
                    state = through
                    if of_lstm:
                        state = slope(at, 5, j) * through + c0[0][b, j]
                        if cells:
                            state = state + cells[0][t, b, j]
                        state = T.bind(state)
                    T.buffer_store(states, state, [t, b, j])
                    for gate in range(1 if resets else 0, 3 if parts > 1 else 1):
                        T.buffer_store(gates, slope(at, gate, j) * state, [t, b, j + size * gate])
                    if of_lstm:
                        T.buffer_store(gates, slope(at, 3, j) * through, [t, b, j + size * 3])
                        T.buffer_store(c0[0], slope(at, 4, j) * state, [b, j])
                    kept = slope(at, 3, j) * state if parts in (4, 5) else zero
                    T.buffer_store(h0, kept, [b, j])
                products = rows
                if resets:
                    # The gradient of the reset state goes through the place of the
                    # gradient of the sum of r.
                    with loops([size]) as (j,):
                        T.buffer_store(gates, zero, [t, b, j])
                        with loops([size]) as (k,):
                            more = gates[t, b, k + 2 * size] * w[k + 2 * size, j]
                            T.buffer_store(gates, gates[t, b, j] + more, [t, b, j])
                        reset = T.bind(gates[t, b, j])
                        T.buffer_store(h0, h0[b, j] + slope(at, 4, j) * reset, [b, j])
                        T.buffer_store(gates, slope(at, 0, j) * reset, [t, b, j])
                    products = 2 * size
                with loops([products, size]) as (k, j):
                    T.buffer_store(h0, h0[b, j] + gates[t, b, k] * w[k, j], [b, j])

    initial = [batch, size]
    shapes = [[steps, batch, rows], [steps, batch, size], initial, *([initial] if of_lstm else [])]
    return _made(body, inputs, shapes, "recurrent_backward")


def recurrent_tangent(
    gates: te.Tensor,
    states: te.Tensor,
    hidden: te.Tensor,
    slopes: te.Tensor,
    weight: te.Tensor,
    cell: te.Tensor | None,
    parts: int,
) -> list[te.Tensor]:
    """Derivative of the recurrence of a layer along a direction.

    Parameters
    ----------
    gates, states, hidden, cell : te.Tensor
        The direction: of the products with the weight, of the cells or hidden states, and of the
        initial states.
    slopes, weight, parts
        As for :func:`recurrent_backward`.

    Returns
    -------
    results : list[te.Tensor]
        The derivatives of the hidden states, of the sums of the gates, and of the cells of an LSTM.
    """
    steps, batch, size = states.shape
    rows = weight.shape[0]
    of_lstm, resets = parts == 6, parts == 5
    inputs = [gates, states, hidden, slopes, weight, *([cell] if of_lstm else [])]

    def body(*buffers: tirx.Buffer) -> None:
        x, own, h0, s, w, *c0 = buffers[: len(inputs)]
        result, sums, *cells = buffers[len(inputs) :]

        def step(t: tirx.PrimExpr, b: tirx.PrimExpr, before_in: StepStates) -> None:
            before = before_in(result, h0)
            _sums(sums, x, w, before, (t, b), rows=2 * size if resets else rows, size=size)
            if resets:

                def reset(k: tirx.PrimExpr) -> tirx.PrimExpr:
                    return s[t, b, k] * sums[t, b, k] + s[t, b, k + size * 4] * before(k)

                _sums(sums, x, w, reset, (t, b), rows=size, size=size, first=2 * size)
            with loops([size]) as (j,):
                slope = [s[t, b, j + size * part] for part in range(parts)]
                value = own[t, b, j]
                for gate in range(1 if resets else 0, 3 if parts > 1 else 1):
                    value = value + slope[gate] * sums[t, b, j + size * gate]
                if of_lstm:
                    value = T.bind(value + slope[4] * before_in(cells[0], c0[0])(j))
                    T.buffer_store(cells[0], value, [t, b, j])
                    value = slope[5] * value + slope[3] * sums[t, b, j + size * 3]
                elif parts in (4, 5):
                    value = value + slope[3] * before(j)
                T.buffer_store(result, value, [t, b, j])

        _each_step(batch, steps, step)

    of_states = [steps, batch, size]
    shapes = [of_states, [steps, batch, rows], *([of_states] if of_lstm else [])]
    return _made(body, inputs, shapes, "recurrent_tangent")


def previous_steps(data: te.Tensor, initial: te.Tensor) -> te.Tensor:
    """Return the initial value, and then the values of all steps but the last one, along the first
    axis."""

    def element(t: tirx.PrimExpr, *index: tirx.PrimExpr) -> tirx.PrimExpr:
        return tirx.if_then_else(t > 0, data[(tirx.max(t - 1, 0), *index)], initial(*index))

    return te.compute(data.shape, element, name="previous_steps", tag=topi.tag.INJECTIVE)


def next_steps(data: te.Tensor) -> te.Tensor:
    """Return the values of all steps but the first one, and then 0, along the first axis."""
    last = data.shape[0] - 1

    def element(t: tirx.PrimExpr, *index: tirx.PrimExpr) -> tirx.PrimExpr:
        value = data[(tirx.min(t + 1, last), *index)]
        return tirx.if_then_else(t < last, value, tirx.const(0, data.dtype))

    return te.compute(data.shape, element, name="next_steps", tag=topi.tag.INJECTIVE)


def _made(
    body: Callable, inputs: Sequence[te.Tensor], shapes: Sequence[Shape], name: str
) -> list[te.Tensor]:
    """Return the results of statements in the dtype of the inputs; zeros if they have no
    elements."""
    dtype = inputs[0].dtype
    if is_empty(shapes[0]):
        return [zeros(shape, dtype) for shape in shapes]
    return statements(body, inputs, [(shape, dtype) for shape in shapes], name)


def _each_step(batch: int | tirx.PrimExpr, steps: int | tirx.PrimExpr, step: Callable) -> None:
    """Emit all steps of a sequence, in a separate task.

    ``step(t, b, before_in)`` emits one; ``before_in(states, initial)`` is a function of the index
    of a unit that returns its state before the step. The first step is apart, since it reads the
    initial state: in a loop, a load would be of an argument or of a result. nvcc takes such a load
    for one of memory that the kernel does not write, and can return an old value.
    """
    with tasks([batch]) as (b,), contextlib.ExitStack() as stack:
        if not is_static(steps):
            stack.enter_context(T.If(steps > 0))
            stack.enter_context(T.Then())
        step(tirx.const(0, "int64"), b, lambda _, initial: lambda j: initial[b, j])
        with loops([steps - 1]) as (t,):
            step(t + 1, b, lambda states, _: lambda j: states[t, b, j])


def _sums(
    target: tirx.Buffer,
    data: tirx.Buffer | None,
    weight: tirx.Buffer,
    before: Callable,
    at: tuple,
    rows: int | tirx.PrimExpr,
    size: int | tirx.PrimExpr,
    first: int | tirx.PrimExpr = 0,
) -> None:
    """Emit the sums of the data of a step and the products of the state and the weight, from its
    first row on."""
    with loops([rows]) as (j,):
        j = j + first
        place = [*at, j]
        start = tirx.const(0, target.dtype) if data is None else data[tuple(place)]
        T.buffer_store(target, start, place)
        with loops([size]) as (k,):
            total = target[tuple(place)] + before(k) * weight[j, k]
            T.buffer_store(target, total, place)


def _sigmoid(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return ``1 / (1 + exp(-x))`` without an overflow."""
    small = T.bind(tirx.exp(-tirx.abs(x)))
    share = T.bind(1 / (1 + small))
    return tirx.if_then_else(x < 0, small * share, share)
