"""Converters of recurrent layers, which TVM has none of.

Layers whose recurrence is an operator, with any number of steps, become this operator. An RNN with
another activation is written out step by step.
"""

from __future__ import annotations

import numpy as np
from tvm import relax, tirx
from tvm.relax import op

from ...ir.compat import constant_value
from ...op import recurrent
from ._converters import Refused, _dtype, _extents, _like, _text

#: More steps would make a module that takes minutes to compile.
_MOST_STEPS = 256


def _lstm(bb, inputs, attrs, opset):
    """``i, o, f = sigmoid(...)``, ``c = f * c + i * tanh(...)``, ``h = o * tanh(c)``; the gates are
    in the order i, o, f, c."""
    if inputs[7] is not None:
        raise Refused("it has peepholes; export it without")
    if attrs.get("input_forget", 0):
        raise Refused("it couples the gates (input_forget=1); export it without")

    def operator(gates, state, weights):
        result = bb.emit(recurrent.lstm(gates, *state, weights.recurrent))
        return [bb.emit(relax.TupleGetItem(result, i)) for i in range(2)]

    activations = ["Sigmoid", "Tanh", "Tanh"]
    whole = operator, [0, 2, 3, 1]
    return _layer(bb, inputs, attrs, 4, [inputs[5], inputs[6]], activations, lambda _: whole)


def _gru(bb, inputs, attrs, opset):
    """``z, r = sigmoid(...)``, ``h = (1 - z) * tanh(...) + z * h``; the gates are in the order z,
    r, h."""
    after = bool(attrs.get("linear_before_reset", 0))

    def operator(gates, state, weights):
        # The layer adds the other biases to the data: all, if the state is reset before the
        # product.
        result = bb.emit(recurrent.gru(gates, *state, weights.recurrent, weights.own_bias))
        return [bb.emit(relax.TupleGetItem(result, 0))]

    whole = operator, [1, 0, 2]
    activations = ["Sigmoid", "Tanh"]
    return _layer(bb, inputs, attrs, 3, [inputs[5]], activations, lambda _: whole, apart=after)


#: The activations of plain recurrent layers.
_ACTIVATIONS = {
    "Relu": op.nn.relu,
    "Sigmoid": op.sigmoid,
    "Softsign": lambda x: op.divide(x, op.add(op.abs(x), _like(1, x))),
    "Tanh": op.tanh,
}

#: The recurrences of plain layers that are operators, by their activation.
_RECURRENCES = {"Relu": recurrent.rnn_relu, "Tanh": recurrent.rnn_tanh}


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

    def whole(number):
        function = _RECURRENCES.get(kinds[min(number, len(kinds) - 1)])
        if function is None:
            return None
        return lambda gates, state, weights: [
            bb.emit(function(gates, *state, weights.recurrent))
        ], [0]

    return _layer(bb, inputs, attrs, 1, [inputs[5]], kinds, whole, step)


def _split(bb, data, indices_or_count, axis: int) -> list[relax.Expr]:
    parts = bb.emit(op.split(data, indices_or_count, axis))
    return [bb.emit(relax.TupleGetItem(parts, i)) for i in range(len(parts.ty.fields))]


class _Weights:
    """The weights of one direction.

    Parameters
    ----------
    order : list[int] or None
        The order of the gates for an operator. None for steps that are written out: ``recurrent``
        is then transposed.
    apart : bool
        Whether the bias of the product of the last gate with the state stays apart from the others.
    """

    def __init__(self, bb, inputs, direction: int, gates: int, order: list[int] | None, apart):
        def of(value, axes):
            if _extents(value)[0] > 1:
                value = bb.emit(op.strided_slice(value, [0], [direction], [direction + 1], [1]))
            value = bb.emit(op.squeeze(value, [0]))
            if order is not None and order != list(range(gates)):
                parts = _split(bb, value, gates, 0)
                value = bb.emit(op.concat([parts[gate] for gate in order], 0))
            return bb.emit(op.permute_dims(value, axes)) if axes else value

        self.number = direction
        self.input = of(inputs[1], [1, 0])
        self.recurrent = of(inputs[2], None if order is not None else [1, 0])
        self.size = _extents(inputs[2])[2]
        width = gates * self.size
        zero = relax.const(np.zeros(width), _dtype(inputs[0]))
        first = second = zero
        if inputs[3] is not None:
            both = inputs[3]
            shape = (_extents(both)[0], 2, width)
            first, second = (
                of(bb.emit(op.squeeze(part, [1])), None)
                for part in _split(bb, bb.emit(op.reshape(both, shape)), 2, 1)
            )
        self.own_bias = None
        if apart:
            parts = _split(bb, second, gates, 0)
            self.own_bias = parts[-1]
            none = relax.const(np.zeros(self.size), _dtype(inputs[0]))
            second = bb.emit(op.concat([*parts[:-1], none], 0))
        self.bias = bb.emit(op.add(first, second))


def _layer(bb, inputs, attrs, gates, initial, activations, whole, step=None, *, apart=False):
    """Return the hidden states of all steps, and the last states.

    ``whole(direction)`` returns the recurrence as an operator with the order of its gates, or None
    for a layer that ``step`` writes out.
    """
    _check(attrs, activations)
    # In the layout 1, the batch is the first axis of the data, the states and the results.
    is_batch_first = bool(attrs.get("layout", 0))
    data = inputs[0]
    if is_batch_first:
        data, *initial = (
            None if tensor is None else bb.emit(op.permute_dims(tensor, [1, 0, 2]))
            for tensor in (data, *initial)
        )
    steps, batch, _ = _extents(data)
    lengths = _lengths(bb, inputs[4], steps)
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    sequences, lasts = [], []
    for number, backwards in enumerate(directions[_text(attrs, "direction", "forward")]):
        operator, order = whole(number) or (None, None)
        weights = _Weights(bb, inputs, number, gates, order, apart)
        state = []
        for start in initial:
            if start is None:
                state.append(
                    bb.emit(op.zeros(relax.ShapeExpr([batch, weights.size]), _dtype(data)))
                )
                continue
            if _extents(start)[0] > 1:
                start = bb.emit(op.strided_slice(start, [0], [number], [number + 1], [1]))
            state.append(bb.emit(op.squeeze(start, [0])))
        products = bb.emit(op.add(op.matmul(data, weights.input), weights.bias))
        if operator is None:
            hidden, state = _written_out(bb, products, step, state, weights, lengths, backwards)
        else:
            order = _Order(bb, products, lengths, backwards)
            states = operator(order.turned(products), state, weights)
            hidden = order.masked(order.turned(states[0]))
            state = [order.last(sequence, old) for sequence, old in zip(states, state, strict=True)]
        sequences.append(hidden)
        lasts.append(state)
    results = [bb.emit(op.stack(sequences, 1))]
    results += [bb.emit(op.stack(list(parts), 0)) for parts in zip(*lasts, strict=True)]
    if is_batch_first:
        orders = [[2, 0, 1, 3], *([1, 0, 2] for _ in results[1:])]
        results = [
            bb.emit(op.permute_dims(result, order))
            for result, order in zip(results, orders, strict=True)
        ]
    return relax.Tuple(results)


class _Order:
    """The order in which a direction reads the steps of sequences, which may end before the last
    step."""

    def __init__(self, bb, products, lengths, backwards: bool):
        self._bb, self._lengths, self._backwards = bb, lengths, backwards
        self._steps = products.ty.shape.values[0]
        if lengths is None:
            return
        places = bb.emit(op.arange(0, self._steps, 1, _dtype(lengths)))
        places = bb.emit(op.reshape(places, relax.ShapeExpr([self._steps, 1, 1])))
        sizes = bb.emit(op.expand_dims(lengths, 0))
        self._inside = bb.emit(op.less(places, sizes))
        ends = bb.emit(op.subtract(sizes, _like(1, lengths)))
        self._is_last = bb.emit(op.equal(places, ends))
        turned = bb.emit(op.subtract(ends, places))
        self._turned = bb.emit(op.where(self._inside, turned, places))

    def masked(self, data):
        """Return 0 in the place of values after the end of their sequence."""
        if self._lengths is None:
            return data
        return self._bb.emit(op.where(self._inside, data, _like(0, data)))

    def turned(self, data):
        """Return the steps of each sequence in the order of the direction, without those after its
        end."""
        bb = self._bb
        if not self._backwards:
            return self.masked(data)
        if self._lengths is None:
            return bb.emit(op.flip(data, 0))
        places = bb.emit(op.astype(self._turned, "int64"))
        places = bb.emit(op.broadcast_to(places, data.ty.shape))
        return self.masked(bb.emit(op.gather_elements(data, places, 0)))

    def last(self, states, initial):
        """Return the states after the last step of each sequence; the initial ones for a sequence
        without steps."""
        bb = self._bb
        if self._lengths is None:
            end = self._steps
            last = bb.emit(op.strided_slice(states, [0], [end - 1], [end], [1]))
            # The sum removes the axis, whose extent is 1 by no analysis if the number of steps is
            # symbolic.
            return bb.emit(op.sum(last, [0]))
        masked = bb.emit(op.where(self._is_last, states, _like(0, states)))
        is_empty = bb.emit(op.less(self._lengths, _like(1, self._lengths)))
        return bb.emit(op.where(is_empty, initial, bb.emit(op.sum(masked, [0]))))


def _written_out(bb, products, step, state, weights, lengths, backwards: bool):
    """Return the hidden states and the last states of a layer whose steps are written out."""
    steps = _extents(products)[0]
    if not isinstance(steps, int):
        raise Refused(
            f"the number of its steps is {steps}, and an RNN with this activation is written out "
            "step by step (others are not: LSTM, GRU, RNN with Tanh or Relu); give the extents "
            "of the inputs: shapes={...}"
        )
    if steps > _MOST_STEPS:
        raise Refused(
            f"it has {steps} steps, and more than {_MOST_STEPS} are not written out; give fewer: "
            "shapes={...}"
        )
    parts = [products] if steps == 1 else _split(bb, products, steps, 0)
    hidden = {}
    for time in reversed(range(steps)) if backwards else range(steps):
        new = step(bb.emit(op.squeeze(parts[time], [0])), state, weights)
        hidden[time] = new[0]
        if lengths is not None:  # after its end, a sequence keeps its state, and the results are 0
            goes_on = bb.emit(op.less(relax.const(time, _dtype(lengths)), lengths))
            new = [
                bb.emit(op.where(goes_on, later, old))
                for later, old in zip(new, state, strict=True)
            ]
            hidden[time] = bb.emit(op.where(goes_on, hidden[time], _like(0, products)))
        state = new
    return bb.emit(op.stack([hidden[time] for time in range(steps)], 0)), state


def _lengths(bb, lengths, steps: int | tirx.PrimExpr):
    """Return the lengths of the sequences as a column; None if no sequence ends before the last
    step."""
    known = None if lengths is None else constant_value(lengths)
    if lengths is None:
        return None
    if known is not None and isinstance(steps, int) and (known >= steps).all():
        return None
    return bb.emit(op.expand_dims(lengths, 1))


def _activations(attrs) -> list[str]:
    """Return the names of the activations, none for the default ones."""
    return [
        name.decode() if isinstance(name, bytes) else name for name in attrs.get("activations", [])
    ]


def _check(attrs, activations) -> None:
    """Refuse the settings that are not written out."""
    names = _activations(attrs)
    if names and names != activations * max(len(names) // len(activations), 1):
        raise Refused(f"it has the activations {', '.join(names)}; only the default ones are known")
    if attrs.get("clip"):
        raise Refused("it has the attribute clip; export it without")


#: The converters of recurrent layers.
RECURRENT = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}
