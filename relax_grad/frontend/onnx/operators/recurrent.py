"""Converters of recurrent layers, which TVM has none of.

Layers of the usual form become an operator. Others become a tensor function of all steps, which is
differentiated by its statements. Both take any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tvm import relax, te, tirx
from tvm.relax import op

from ....ir.compat import constant_value
from ....ir.dtypes import accumulation_dtype
from ....op import recurrent
from ....topi import recurrent_cells as cells
from .converters import (
    Attrs,
    Builder,
    Converter,
    Inputs,
    Refused,
    Result,
    _dtype,
    _extents,
    _like,
    _text,
)


def _lstm(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """``i, o, f = sigmoid(...)``, ``c = f * c + i * tanh(...)``, ``h = o * tanh(c)``; the gates are
    in the order i, o, f, c."""
    coupled = attrs.get("input_forget", 0)
    if coupled not in (0, 1):
        raise Refused(
            f"its attribute input_forget is {coupled}; it is 1 where the gate f is 1 - i, and "
            "otherwise 0"
        )
    cell = _Cell.of(attrs, ["Sigmoid", "Tanh", "Tanh"])
    is_usual = cell.is_usual and inputs[7] is None and not coupled

    def usual(gates: relax.Expr, state: list[relax.Expr], weights: _Weights) -> list[relax.Expr]:
        return _elements(bb, recurrent.lstm(gates, state[0], state[1], weights.recurrent), 2)

    def other(gates: relax.Expr, state: list[relax.Expr], weights: _Weights) -> list[relax.Expr]:
        operands = [gates, *state, weights.recurrent]
        if inputs[7] is not None:
            operands.append(_of_direction(bb, inputs[7], weights.number))

        def function(
            x: te.Tensor, h: te.Tensor, c: te.Tensor, w: te.Tensor, *peepholes: te.Tensor
        ) -> list:
            peephole = peepholes[0] if peepholes else None
            own = cell.activations[weights.number]
            return cells.lstm_cells(
                x, h, c, w, peephole, activations=own, bound=cell.bound, is_coupled=bool(coupled)
            )

        return _computed(bb, function, operands, 2)

    whole = (usual, [0, 2, 3, 1]) if is_usual else (other, None)
    return _layer(bb, inputs, attrs, 4, [inputs[5], inputs[6]], whole=lambda _: whole)


def _gru(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """``z, r = sigmoid(...)``, ``h = (1 - z) * tanh(...) + z * h``; the gates are in the order z,
    r, h."""
    after = bool(attrs.get("linear_before_reset", 0))
    cell = _Cell.of(attrs, ["Sigmoid", "Tanh"])

    def usual(gates: relax.Expr, state: list[relax.Expr], weights: _Weights) -> list[relax.Expr]:
        # The layer adds the other biases to the data: all, if the state is reset before the
        # product.
        result = recurrent.gru(gates, state[0], weights.recurrent, weights.own_bias)
        return _elements(bb, result, 1)

    def other(gates: relax.Expr, state: list[relax.Expr], weights: _Weights) -> list[relax.Expr]:
        operands = [gates, *state, weights.recurrent]
        if after:
            operands.append(weights.own_bias)

        def function(x: te.Tensor, h: te.Tensor, w: te.Tensor, *biases: te.Tensor) -> list:
            bias = biases[0] if biases else None
            return cells.gru_cells(
                x, h, w, bias, cell.activations[weights.number], bound=cell.bound
            )

        return _computed(bb, function, operands, 1)

    whole = (usual, [1, 0, 2]) if cell.is_usual else (other, None)
    return _layer(bb, inputs, attrs, 3, [inputs[5]], whole=lambda _: whole, apart=after)


#: The recurrences of plain layers that are operators, by their activation.
_RECURRENCES = {"Relu": recurrent.rnn_relu, "Tanh": recurrent.rnn_tanh}


def _rnn(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """``h = tanh(...)``, or another activation, which may differ between the directions."""
    cell = _Cell.of(attrs, ["Tanh"])

    def whole(number: int) -> tuple[Callable, list[int] | None]:
        own = cell.activations[number]
        usual = None if cell.bound is not None else _RECURRENCES.get(own[0].name)

        def operator(
            gates: relax.Expr, state: list[relax.Expr], weights: _Weights
        ) -> list[relax.Expr]:
            operands = [gates, *state, weights.recurrent]
            if usual is not None:
                return [bb.emit(usual(*operands))]
            return _computed(
                bb, lambda x, h, w: cells.rnn_cells(x, h, w, own, cell.bound), operands, 1
            )

        return operator, None

    return _layer(bb, inputs, attrs, 1, [inputs[5]], whole=whole)


class _Cell(NamedTuple):
    """The activations of each direction of a layer, and the bound of their operands."""

    activations: list[tuple[cells.Activation, ...]]
    bound: float | None
    is_usual: bool

    @classmethod
    def of(cls, attrs: Attrs, default: list[str]) -> _Cell:
        """Return the activations of a node.

        The values of ``activation_alpha`` and ``activation_beta`` belong to the activations that
        have such a parameter, in their order.
        """
        directions = len(_directions(attrs))
        given = [
            name.decode() if isinstance(name, bytes) else name
            for name in attrs.get("activations", [])
        ]
        count = len(default)
        if len(given) not in (0, count, count * directions):
            numbers = " or ".join(map(str, sorted({count, count * directions})))
            raise Refused(
                f"its attribute activations has {len(given)} names ({', '.join(given)}); it must "
                f"have {numbers} for its {directions} direction{'s' if directions > 1 else ''}"
            )
        names = [_known(name) for name in given or default]
        parameters = [_parameters(attrs, which, names) for which in ("alpha", "beta")]
        rows = [
            cells.Activation(name, *pair) for name, *pair in zip(names, *parameters, strict=True)
        ]
        by_direction = [tuple(rows[i : i + count]) for i in range(0, len(rows), count)]
        by_direction *= directions // len(by_direction)
        bound = attrs.get("clip")
        if bound is not None and not bound > 0:
            raise Refused(f"its attribute clip is {bound:g}; a bound is positive: leave it out")
        return cls(by_direction, bound, bound is None and names == default * (len(names) // count))


def _known(name: str) -> str:
    """Return the name of an activation as ONNX spells it; ONNX Runtime takes any case."""
    spelled = {known.lower(): known for known in cells.ACTIVATIONS}.get(name.lower())
    if spelled is None:
        raise Refused(f"it has the activation {name}; known are {', '.join(cells.ACTIVATIONS)}")
    return spelled


def _parameters(attrs: Attrs, which: str, names: list[str]) -> list[float]:
    """Return a parameter of all activations, 0 for those that do not have it."""
    values = list(attrs.get(f"activation_{which}", []))
    defaults = [getattr(cells.ACTIVATIONS[name], which) for name in names]
    takers = sum(default is not None for default in defaults)
    if len(values) > takers and takers:
        shown = ", ".join(f"{value:g}" for value in values)
        raise Refused(
            f"its attribute activation_{which} has {len(values)} values ({shown}), and {takers} of "
            f"its activations ({', '.join(names)}) take one; give one for each of these"
        )
    result = [
        0.0 if default is None else float(values.pop(0) if values else default)
        for default in defaults
    ]
    unset = next((name for name, x in zip(names, result, strict=True) if math.isnan(x)), None)
    if unset is not None:
        raise Refused(
            f"its activation {unset} has no activation_{which}, and no default value that ONNX "
            f"and ONNX Runtime share; set the attribute activation_{which}"
        )
    return result


def _directions(attrs: Attrs) -> list[bool]:
    """Return for each direction whether it is backwards."""
    known = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    kind = _text(attrs, "direction", "forward")
    if kind not in known:
        raise Refused(f"its attribute direction is {kind!r}; it must be one of {', '.join(known)}")
    return known[kind]


def _elements(bb: Builder, result: relax.Expr, count: int) -> list[relax.Expr]:
    result = bb.emit(result)
    return [bb.emit(relax.TupleGetItem(result, i)) for i in range(count)]


def _computed(
    bb: Builder, function: Callable, operands: list[relax.Expr], count: int
) -> list[relax.Expr]:
    """Return the first results of a tensor function; half precision is computed in float32."""
    dtype = _dtype(operands[0])
    wide = accumulation_dtype(dtype)
    if wide != dtype:
        operands = [bb.emit(op.astype(operand, wide)) for operand in operands]
    results = bb.emit_te(function, *operands, primfunc_name_hint="recurrence")
    results = [bb.emit(relax.TupleGetItem(results, i)) for i in range(count)]
    return [bb.emit(op.astype(x, dtype)) for x in results] if wide != dtype else results


def _split(
    bb: Builder, data: relax.Expr, indices_or_count: int | list[int], axis: int
) -> list[relax.Expr]:
    parts = bb.emit(op.split(data, indices_or_count, axis))
    return [bb.emit(relax.TupleGetItem(parts, i)) for i in range(len(parts.ty.fields))]


def _of_direction(bb: Builder, value: relax.Expr, number: int) -> relax.Expr:
    """Return the part of a tensor that belongs to a direction."""
    if _extents(value)[0] > 1:
        value = bb.emit(op.strided_slice(value, [0], [number], [number + 1], [1]))
    return bb.emit(op.squeeze(value, [0]))


class _Weights:
    """The weights of one direction.

    Parameters
    ----------
    order : list[int] or None
        The order of the gates, None for ONNX's order.
    apart : bool
        Whether the bias of the product of the last gate with the state stays apart from the others.
    """

    def __init__(
        self,
        bb: Builder,
        inputs: Inputs,
        direction: int,
        gates: int,
        order: list[int] | None,
        apart: bool,
    ):
        def ordered(value: relax.Expr) -> relax.Expr:
            value = _of_direction(bb, value, direction)
            if order is None:
                return value
            parts = _split(bb, value, gates, 0)
            return bb.emit(op.concat([parts[gate] for gate in order], 0))

        self.number = direction
        self.input = bb.emit(op.permute_dims(ordered(inputs[1]), [1, 0]))
        self.recurrent = ordered(inputs[2])
        self.size = _extents(inputs[2])[2]
        width = gates * self.size
        zero = relax.const(np.zeros(width), _dtype(inputs[0]))
        first = second = zero
        if inputs[3] is not None:
            both = inputs[3]
            shape = (_extents(both)[0], 2, width)
            first, second = (
                ordered(bb.emit(op.squeeze(part, [1])))
                for part in _split(bb, bb.emit(op.reshape(both, shape)), 2, 1)
            )
        self.own_bias = None
        if apart:
            parts = _split(bb, second, gates, 0)
            self.own_bias = parts[-1]
            none = relax.const(np.zeros(self.size), _dtype(inputs[0]))
            second = bb.emit(op.concat([*parts[:-1], none], 0))
        self.bias = bb.emit(op.add(first, second))


def _layer(
    bb: Builder,
    inputs: Inputs,
    attrs: Attrs,
    gates: int,
    initial: list[relax.Expr | None],
    whole: Callable,
    *,
    apart: bool = False,
) -> relax.Expr:
    """Return the hidden states of all steps, and the last states.

    ``whole(direction)`` returns the recurrence of all steps, and the order of its gates, None for
    ONNX's.
    """
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
    sequences, lasts = [], []
    for number, backwards in enumerate(_directions(attrs)):
        recurrence, gate_order = whole(number)
        weights = _Weights(bb, inputs, number, gates=gates, order=gate_order, apart=apart)
        state = []
        for start in initial:
            if start is None:
                state.append(
                    bb.emit(op.zeros(relax.ShapeExpr([batch, weights.size]), _dtype(data)))
                )
                continue
            state.append(_of_direction(bb, start, number))
        products = bb.emit(op.add(op.matmul(data, weights.input), weights.bias))
        order = _Order(bb, products, lengths, backwards)
        states = recurrence(order.turned(products), state, weights)
        sequences.append(order.masked(order.turned(states[0])))
        lasts.append(
            [order.last(sequence, old) for sequence, old in zip(states, state, strict=True)]
        )
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

    def __init__(
        self, bb: Builder, products: relax.Expr, lengths: relax.Expr | None, backwards: bool
    ):
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

    def masked(self, data: relax.Expr) -> relax.Expr:
        """Return 0 instead of values after the end of their sequence."""
        if self._lengths is None:
            return data
        return self._bb.emit(op.where(self._inside, data, _like(0, data)))

    def turned(self, data: relax.Expr) -> relax.Expr:
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

    def last(self, states: relax.Expr, initial: relax.Expr) -> relax.Expr:
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


def _lengths(
    bb: Builder, lengths: relax.Expr | None, steps: int | tirx.PrimExpr
) -> relax.Expr | None:
    """Return the lengths of the sequences as a column; None if no sequence ends before the last
    step."""
    known = None if lengths is None else constant_value(lengths)
    if lengths is None:
        return None
    if known is not None and isinstance(steps, int) and (known >= steps).all():
        return None
    return bb.emit(op.expand_dims(lengths, 1))


#: The converters of recurrent layers.
RECURRENT: dict[str, Converter] = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}
