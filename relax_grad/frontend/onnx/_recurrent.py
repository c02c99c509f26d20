"""Converters of recurrent layers, which TVM has none of: the steps are written out."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from ...ir.compat import constant_value
from ._converters import Refused, _dtype, _extents, _like, _text

#: More steps would make a module that takes minutes to compile.
_MOST_STEPS = 256


def _lstm(bb, inputs, attrs, opset):
    """``i, o, f = sigmoid(...)``, ``c = f * c + i * tanh(...)``, ``h = o * tanh(c)``; the gates are in the order i, o, f, c."""
    if inputs[7] is not None:
        raise Refused("it has peepholes; export it without")
    if attrs.get("input_forget", 0):
        raise Refused("it couples the gates (input_forget=1); export it without")

    def step(gates, state, weights):
        hidden, cell = state
        gates = bb.emit(op.add(gates, op.matmul(hidden, weights.recurrent)))
        i, o, f, c = _split(bb, gates, 4, -1)
        i, o, f = (bb.emit(op.sigmoid(each)) for each in (i, o, f))
        cell = bb.emit(op.add(op.multiply(f, cell), op.multiply(i, op.tanh(c))))
        return bb.emit(op.multiply(o, op.tanh(cell))), cell

    activations = ["Sigmoid", "Tanh", "Tanh"]
    return _layer(bb, inputs, attrs, step, 4, [inputs[5], inputs[6]], activations)


def _gru(bb, inputs, attrs, opset):
    """``z, r = sigmoid(...)``, ``h = (1 - z) * tanh(...) + z * h``; the gates are in the order z, r, h."""
    after = bool(attrs.get("linear_before_reset", 0))

    def step(gates, state, weights):
        (hidden,) = state
        size = weights.size
        z, r, h = _split(bb, gates, 3, -1)
        if after:
            products = bb.emit(op.matmul(hidden, weights.recurrent))
            products = bb.emit(op.add(products, weights.recurrent_bias))
            of_z, of_r, of_h = _split(bb, products, 3, -1)
        else:
            both, last = _split(bb, weights.recurrent, [2 * size], -1)
            of_z, of_r = _split(bb, bb.emit(op.matmul(hidden, both)), 2, -1)
        z = bb.emit(op.sigmoid(op.add(z, of_z)))
        r = bb.emit(op.sigmoid(op.add(r, of_r)))
        of_h = op.multiply(r, of_h) if after else op.matmul(bb.emit(op.multiply(r, hidden)), last)
        h = bb.emit(op.tanh(op.add(h, of_h)))
        kept = op.multiply(z, hidden)
        return (bb.emit(op.add(op.multiply(op.subtract(_like(1, z), z), h), kept)),)

    return _layer(bb, inputs, attrs, step, 3, [inputs[5]], ["Sigmoid", "Tanh"], after)


#: The activations of plain recurrent layers.
_ACTIVATIONS = {
    "Relu": op.nn.relu,
    "Sigmoid": op.sigmoid,
    "Softsign": lambda x: op.divide(x, op.add(op.abs(x), _like(1, x))),
    "Tanh": op.tanh,
}


def _rnn(bb, inputs, attrs, opset):
    """``h = tanh(...)``, or another activation, which may differ between the directions."""
    kinds = _activations(attrs) or ["Tanh"]
    unknown = [kind for kind in kinds if kind not in _ACTIVATIONS]
    if unknown:
        raise Refused(f"it has the activation {unknown[0]}; known are {', '.join(_ACTIVATIONS)}")

    def step(gates, state, weights):
        (hidden,) = state
        function = _ACTIVATIONS[kinds[min(weights.number, len(kinds) - 1)]]
        total = bb.normalize(op.add(gates, op.matmul(hidden, weights.recurrent)))
        return (bb.emit(function(total)),)

    return _layer(bb, inputs, attrs, step, 1, [inputs[5]], kinds)


def _split(bb, data, indices_or_count, axis: int) -> list[relax.Expr]:
    parts = bb.emit(op.split(data, indices_or_count, axis))
    return [bb.emit(relax.TupleGetItem(parts, i)) for i in range(len(parts.ty.fields))]


class _Weights:
    """The weights of one direction: ``recurrent`` is transposed, and the biases of both kinds are apart or added."""

    def __init__(self, bb, inputs, direction: int, gates: int, apart: bool):
        def of(value, axes):
            if _extents(value)[0] > 1:
                value = bb.emit(op.strided_slice(value, [0], [direction], [direction + 1], [1]))
            value = bb.emit(op.squeeze(value, [0]))
            return bb.emit(op.permute_dims(value, axes)) if axes else value

        self.number = direction
        self.input, self.recurrent = of(inputs[1], [1, 0]), of(inputs[2], [1, 0])
        self.size = _extents(self.recurrent)[0]
        width = gates * self.size
        self.bias = self.recurrent_bias = relax.const(np.zeros(width), _dtype(inputs[0]))
        if inputs[3] is not None:
            first, second = _split(bb, of(inputs[3], None), [width], 0)
            self.bias = first if apart else bb.emit(op.add(first, second))
            self.recurrent_bias = second


def _layer(bb, inputs, attrs, step, gates, initial, activations, apart=False):
    """Return the hidden states of all steps, and the last states."""
    _check(attrs, activations)
    data = inputs[0]
    steps, batch, _ = _extents(data)
    if not isinstance(steps, int):
        raise Refused(
            f"the number of its steps is {steps}; give the extents of the inputs: shapes={{...}}"
        )
    if steps > _MOST_STEPS:
        raise Refused(
            f"it has {steps} steps, and more than {_MOST_STEPS} are not written out; give fewer: shapes={{...}}"
        )
    lengths = _lengths(bb, inputs[4], steps)
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    sequences, lasts = [], []
    for number, backwards in enumerate(directions[_text(attrs, "direction", "forward")]):
        weights = _Weights(bb, inputs, number, gates, apart)
        state = []
        for each in initial:
            if each is None:
                state.append(
                    bb.emit(op.zeros(relax.ShapeExpr([batch, weights.size]), _dtype(data)))
                )
                continue
            if _extents(each)[0] > 1:
                each = bb.emit(op.strided_slice(each, [0], [number], [number + 1], [1]))
            state.append(bb.emit(op.squeeze(each, [0])))
        products = bb.emit(op.add(op.matmul(data, weights.input), weights.bias))
        parts = [products] if steps == 1 else _split(bb, products, steps, 0)
        hidden = {}
        for time in reversed(range(steps)) if backwards else range(steps):
            new = step(bb.emit(op.squeeze(parts[time], [0])), state, weights)
            hidden[time] = new[0]
            if (
                lengths is not None
            ):  # after its end, a sequence keeps its state, and the results are 0
                goes_on = bb.emit(op.less(relax.const(time, _dtype(lengths)), lengths))
                new = [
                    bb.emit(op.where(goes_on, one, old))
                    for one, old in zip(new, state, strict=True)
                ]
                hidden[time] = bb.emit(op.where(goes_on, hidden[time], _like(0, data)))
            state = new
        sequences.append(bb.emit(op.stack([hidden[time] for time in range(steps)], 0)))
        lasts.append(state)
    results = [bb.emit(op.stack(sequences, 1))]
    results += [bb.emit(op.stack(list(each), 0)) for each in zip(*lasts, strict=True)]
    return relax.Tuple(results)


def _lengths(bb, lengths, steps: int):
    """Return the lengths of the sequences as a column; None if no sequence ends before the last step."""
    known = None if lengths is None else constant_value(lengths)
    if lengths is None or (known is not None and (known >= steps).all()):
        return None
    return bb.emit(op.expand_dims(lengths, 1))


def _activations(attrs) -> list[str]:
    """Return the names of the activations, none for the default ones."""
    return [
        each.decode() if isinstance(each, bytes) else each for each in attrs.get("activations", [])
    ]


def _check(attrs, activations) -> None:
    """Refuse the settings that are not written out."""
    found = _activations(attrs)
    if found and found != activations * max(len(found) // len(activations), 1):
        raise Refused(f"it has the activations {', '.join(found)}; only the default ones are known")
    if attrs.get("clip") or attrs.get("layout", 0):
        raise Refused("it has the attribute clip or layout=1; export it without")


#: The converters of recurrent layers.
RECURRENT = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}
