"""Recurrences over time of layers with any activations, bounds of their operands, and peepholes.

Unlike the recurrences of :mod:`relax_grad.topi.recurrent`, they return no slopes: they are
differentiated by their statements. So an activation is computed by functions of TIR with the
derivatives of the activation everywhere, also at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from ._loops import loops
from .recurrent import StepStates, _each_step, _made, _sums


class Activation(NamedTuple):
    """An activation of a layer, by its name in ONNX.

    Attributes
    ----------
    name : str
        One of :data:`ACTIVATIONS`.
    alpha, beta : float
        Its parameters; those that it does not have are ignored.
    """

    name: str
    alpha: float
    beta: float


class _Form(NamedTuple):
    """The function of an activation, and the default values of the parameters that it has; NaN for
    a parameter without one."""

    function: Callable
    alpha: float | None = None
    beta: float | None = None


def _like(value: float, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a number of the dtype of another one."""
    return tirx.const(value, str(x.ty.dtype))


def _softplus(x: tirx.PrimExpr, alpha: tirx.PrimExpr, beta: tirx.PrimExpr) -> tirx.PrimExpr:
    positive = x + tirx.log1p(tirx.exp(-x))
    return tirx.if_then_else(x > 0, positive, tirx.log1p(tirx.exp(x)))


def _bounded(x: tirx.PrimExpr, low: float, high: float) -> tirx.PrimExpr:
    """Return a number within bounds; with the operands in this order, a NaN propagates."""
    low, high = (_like(bound, x) for bound in (low, high))
    return tirx.Min(high, tirx.Max(low, x))


#: The activations of ONNX, and the default values of their parameters in ONNX's
#: operators. Affine and ScaledTanh are no operators any more, and ONNX Runtime has another default
#: value for ThresholdedRelu.
ACTIVATIONS: dict[str, _Form] = {
    "Affine": _Form(lambda x, alpha, beta: alpha * x + beta, math.nan, math.nan),
    "Elu": _Form(lambda x, alpha, _: tirx.if_then_else(x > 0, x, alpha * (tirx.exp(x) - 1)), 1.0),
    "HardSigmoid": _Form(lambda x, alpha, beta: _bounded(alpha * x + beta, 0, 1), 0.2, 0.5),
    "LeakyRelu": _Form(lambda x, alpha, _: tirx.if_then_else(x > 0, x, alpha * x), 0.01),
    "Relu": _Form(lambda x, *_: tirx.Max(_like(0, x), x)),
    "ScaledTanh": _Form(lambda x, alpha, beta: alpha * tirx.tanh(beta * x), math.nan, math.nan),
    "Sigmoid": _Form(lambda x, *_: tirx.sigmoid(x)),
    "Softplus": _Form(_softplus),
    "Softsign": _Form(lambda x, *_: x / (1 + tirx.abs(x))),
    "Tanh": _Form(lambda x, *_: tirx.tanh(x)),
    "ThresholdedRelu": _Form(
        lambda x, alpha, _: tirx.if_then_else(x > alpha, x, _like(0, x)), math.nan
    ),
}


def lstm_cells(
    data: te.Tensor,
    hidden: te.Tensor,
    cell: te.Tensor,
    weight: te.Tensor,
    peepholes: te.Tensor | None,
    activations: tuple[Activation, ...],
    bound: float | None,
    is_coupled: bool,
) -> list[te.Tensor]:
    """Long short-term memory over time, with the gates i, o, f and c.

    With the sums z of the gates and the peepholes p: ``i = f(z_i + p_i * c)``,
    ``f = f(z_f + p_f * c)``, ``c' = f * c + i * g(z_c)``, ``o = f(z_o + p_o * c')`` and
    ``h' = o * h(c')`` with the activations f, g and h.

    Parameters
    ----------
    data : te.Tensor
        The products of the inputs and the input weight, with all biases,
        ``(steps, batch, 4 * size)``.
    hidden, cell : te.Tensor
        The initial states, ``(batch, size)``.
    weight : te.Tensor
        The recurrent weight, ``(4 * size, size)``.
    peepholes : te.Tensor or None
        The peepholes of the gates i, o and f, ``(3 * size,)``.
    activations : tuple[Activation, ...]
        The activations f, g and h.
    bound : float or None
        The largest absolute value of the operands of f and g. That of h has no bound, as in ONNX
        Runtime.
    is_coupled : bool
        Whether the gate f is ``1 - i``.

    Returns
    -------
    results : list[te.Tensor]
        The hidden states, the cells, and the sums of the gates.
    """
    steps, batch, _ = data.shape
    size = weight.shape[1]
    f, g = (_function(activation, bound) for activation in activations[:2])
    h = _function(activations[2], None)

    def body(
        x: tirx.Buffer, h0: tirx.Buffer, c0: tirx.Buffer, w: tirx.Buffer, *others: tirx.Buffer
    ) -> None:
        states, cells, sums = others[-3:]

        def step(t: tirx.PrimExpr, b: tirx.PrimExpr, before_in: StepStates) -> None:
            _sums(sums, x, w, before_in(states, h0), (t, b), rows=4 * size, size=size)
            with loops([size]) as (j,):
                last = T.bind(before_in(cells, c0)(j))

                def gate(number: int, seen: tirx.PrimExpr) -> tirx.PrimExpr:
                    """Return a gate, whose peephole sees a cell."""
                    total = sums[t, b, j + size * number]
                    if peepholes is not None:
                        total = total + others[0][j + size * number] * seen
                    return f(total)

                i = gate(0, last)
                kept = T.bind(1 - i) if is_coupled else gate(2, last)
                new = T.bind(kept * last + i * g(sums[t, b, j + size * 3]))
                T.buffer_store(cells, new, [t, b, j])
                T.buffer_store(states, gate(1, new) * h(new), [t, b, j])

        _each_step(batch, steps, step)

    inputs = [data, hidden, cell, weight, *([] if peepholes is None else [peepholes])]
    states = [steps, batch, size]
    return _made(body, inputs, [states, states, [steps, batch, 4 * size]], "lstm_cells")


def gru_cells(
    data: te.Tensor,
    hidden: te.Tensor,
    weight: te.Tensor,
    bias: te.Tensor | None,
    activations: tuple[Activation, ...],
    bound: float | None,
) -> list[te.Tensor]:
    """Gated recurrent unit over time, with the gates z, r and h.

    With the activations f and g: ``z, r = f(...)`` of the sums of the data and ``s @ weight^T`` of
    the state s, ``h = g(data + r * (s @ weight^T + bias))`` and ``s' = (1 - z) * h + z * s``.

    Parameters
    ----------
    data : te.Tensor
        The products of the inputs and the input weight, ``(steps, batch, 3 * size)``, with all
        biases but ``bias``.
    hidden : te.Tensor
        The initial state, ``(batch, size)``.
    weight : te.Tensor
        The recurrent weight, ``(3 * size, size)``.
    bias : te.Tensor or None
        The recurrent bias of the gate h, ``(size,)``. None if the gate r resets the state before
        the product.
    activations : tuple[Activation, ...]
        The activations f and g.
    bound : float or None
        The largest absolute value of the operand of an activation.

    Returns
    -------
    results : list[te.Tensor]
        The hidden states, the sums of the gates, and the states that the gate r has reset, or
        their products.
    """
    steps, batch, _ = data.shape
    size = weight.shape[1]
    f, g = (_function(activation, bound) for activation in activations)

    def body(x: tirx.Buffer, h0: tirx.Buffer, w: tirx.Buffer, *others: tirx.Buffer) -> None:
        states, sums, resets = others[-3:]

        def step(t: tirx.PrimExpr, b: tirx.PrimExpr, before_in: StepStates) -> None:
            before = before_in(states, h0)
            _sums(sums, x, w, before, (t, b), rows=2 * size, size=size)
            if bias is None:
                with loops([size]) as (j,):
                    r = f(sums[t, b, j + size])
                    T.buffer_store(resets, r * before(j), [t, b, j])
                _sums(
                    sums,
                    x,
                    w,
                    lambda k: resets[t, b, k],
                    (t, b),
                    rows=size,
                    size=size,
                    first=2 * size,
                )
            else:
                with loops([size]) as (j,):
                    T.buffer_store(resets, others[0][j], [t, b, j])
                    with loops([size]) as (k,):
                        product = before(k) * w[j + size * 2, k]
                        T.buffer_store(resets, resets[t, b, j] + product, [t, b, j])
                    r = f(sums[t, b, j + size])
                    total = x[t, b, j + size * 2] + r * resets[t, b, j]
                    T.buffer_store(sums, total, [t, b, j + size * 2])
            with loops([size]) as (j,):
                z = f(sums[t, b, j])
                new = g(sums[t, b, j + size * 2])
                T.buffer_store(states, (1 - z) * new + z * before(j), [t, b, j])

        _each_step(batch, steps, step)

    inputs = [data, hidden, weight, *([] if bias is None else [bias])]
    states = [steps, batch, size]
    return _made(body, inputs, [states, [steps, batch, 3 * size], states], "gru_cells")


def rnn_cells(
    data: te.Tensor,
    hidden: te.Tensor,
    weight: te.Tensor,
    activations: tuple[Activation, ...],
    bound: float | None,
) -> list[te.Tensor]:
    """Recurrence ``h = f(data[t] + h @ weight^T)``.

    Parameters
    ----------
    data : te.Tensor
        The products of the inputs and the input weight, ``(steps, batch, size)``.
    hidden : te.Tensor
        The initial state, ``(batch, size)``.
    weight : te.Tensor
        The recurrent weight, ``(size, size)``.
    activations : tuple[Activation, ...]
        The activation f.
    bound : float or None
        The largest absolute value of the operand of the activation.

    Returns
    -------
    results : list[te.Tensor]
        The hidden states, and the sums.
    """
    steps, batch, size = data.shape
    (f,) = (_function(activation, bound) for activation in activations)

    def body(
        x: tirx.Buffer, h0: tirx.Buffer, w: tirx.Buffer, states: tirx.Buffer, sums: tirx.Buffer
    ) -> None:
        def step(t: tirx.PrimExpr, b: tirx.PrimExpr, before_in: StepStates) -> None:
            _sums(sums, x, w, before_in(states, h0), (t, b), rows=size, size=size)
            with loops([size]) as (j,):
                T.buffer_store(states, f(sums[t, b, j]), [t, b, j])

        _each_step(batch, steps, step)

    states = [steps, batch, size]
    return _made(body, [data, hidden, weight], [states, states], "rnn_cells")


def _function(activation: Activation, bound: float | None) -> Callable:
    """Return a function that binds the value of an activation, whose operand is bounded."""
    function = ACTIVATIONS[activation.name].function

    def value(x: tirx.PrimExpr) -> tirx.PrimExpr:
        x = T.bind(x if bound is None else _bounded(x, -bound, bound))
        alpha, beta = (_like(number, x) for number in activation[1:])
        return T.bind(function(x, alpha, beta))

    return value
