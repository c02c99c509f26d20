"""Recurrent layers: the recurrence over time of one layer in one direction, and its derivatives.

A layer is the product of all inputs and the input weight, and the recurrence of this module on the
sums. The recurrences return the slopes that their derivatives are made of. Both derivatives, the
backward operator and the tangent, are linear recurrences with these slopes as coefficients, and the
derivatives of one are the other one and products. So the operators are differentiable to any order,
for symbolic numbers of steps too.

The slopes of a step lie one after the other, each as wide as the state:

========  =============================================================  =========
layer     slopes                                                         gates
========  =============================================================  =========
LSTM      of the cell by the gates i, f, g; of the hidden state by the   i, f, g, o
          gate o; of the cell by the previous cell, which is f; of the
          hidden state by the cell
GRU       of the hidden state by the products of the gates r, z, n, and  r, z, n
          by the previous hidden state, which is z
GRU that  of the state that the gate r resets by the sum of r; of the    r, z, n
resets    hidden state by the sums of z, n, and by the previous hidden
first     state, which is z; of the reset state by the previous hidden
          state, which is r
RNN       of the hidden state by its only gate                           one
========  =============================================================  =========
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import Analyzer, dtype_of
from ._infer import shape_text, tensor_type, type_of_shape
from .declare import declare_op

#: The number of gates of each layer, by the number of its slopes.
GATES = {6: 4, 5: 3, 4: 3, 1: 1}


def lstm(data: relax.Expr, hidden: relax.Expr, cell: relax.Expr, weight: relax.Expr) -> relax.Call:
    """Long short-term memory: the recurrence of one layer over time.

    With the sums ``z = data[t] + h @ weight^T`` of the gates i, f, g and o, in this order:
    ``c = sigmoid(f) * c + sigmoid(i) * tanh(g)`` and ``h = sigmoid(o) * tanh(c)``.

    Parameters
    ----------
    data : relax.Expr
        The products of the inputs and the input weight, with all biases,
        ``(steps, batch, 4 * size)``.
    hidden, cell : relax.Expr
        The initial states, ``(batch, size)``.
    weight : relax.Expr
        The recurrent weight, ``(4 * size, size)``.

    Returns
    -------
    result : relax.Call
        The hidden states and the cells after each step, ``(steps, batch, size)``, and the slopes,
        ``(steps, batch, 6 * size)``. Half precision is computed in float32.
    """
    return relax.Call(Op.get("relax.grad.lstm"), [data, hidden, cell, weight])


def gru(
    data: relax.Expr, hidden: relax.Expr, weight: relax.Expr, bias: relax.Expr | None = None
) -> relax.Call:
    """Gated recurrent unit: the recurrence of one layer over time.

    With ``r, z = sigmoid(...)`` of the sums of ``data[t]`` and ``h @ weight^T``, and
    ``n = tanh(data[t] + r * (h @ weight^T + bias))``: ``h = (1 - z) * n + z * h``. The gates are in
    the order r, z, n.

    Without ``bias``, the gate r resets the state before its product with the weight:
    ``n = tanh(data[t] + (r * h) @ weight^T)``. This is the formula of Cho et al. (2014), and ONNX's
    ``linear_before_reset=0``. All biases belong to the data then. A layer that resets after the
    product and has no bias takes one of zeros.

    Parameters
    ----------
    data : relax.Expr
        The products of the inputs and the input weight, ``(steps, batch, 3 * size)``, with all
        biases but ``bias``.
    hidden : relax.Expr
        The initial state, ``(batch, size)``.
    weight : relax.Expr
        The recurrent weight, ``(3 * size, size)``.
    bias : relax.Expr, optional
        The recurrent bias of the gate n, ``(size,)``. None: the state is reset before the product.

    Returns
    -------
    result : relax.Call
        The hidden states after each step, ``(steps, batch, size)``, the slopes,
        ``(steps, batch, 4 * size)``, and those of the hidden states by the data of the gate n.
        Without ``bias``, the hidden states and the slopes, ``(steps, batch, 5 * size)``. Half
        precision is computed in float32.
    """
    others = [] if bias is None else [bias]
    return relax.Call(Op.get("relax.grad.gru"), [data, hidden, weight, *others])


def rnn_tanh(data: relax.Expr, hidden: relax.Expr, weight: relax.Expr) -> relax.Call:
    """Recurrence ``h = tanh(data[t] + h @ weight^T)`` of one layer over time.

    Parameters
    ----------
    data : relax.Expr
        The products of the inputs and the input weight, with all biases, ``(steps, batch, size)``.
    hidden : relax.Expr
        The initial state, ``(batch, size)``.
    weight : relax.Expr
        The recurrent weight, ``(size, size)``.

    Returns
    -------
    result : relax.Call
        The hidden states after each step, ``(steps, batch, size)``. Half precision is computed in
        float32.
    """
    return relax.Call(Op.get("relax.grad.rnn_tanh"), [data, hidden, weight])


def rnn_relu(data: relax.Expr, hidden: relax.Expr, weight: relax.Expr) -> relax.Call:
    """Recurrence ``h = relu(data[t] + h @ weight^T)`` of one layer over time.

    Parameters
    ----------
    data, hidden, weight
        As for :func:`rnn_tanh`.

    Returns
    -------
    result : relax.Call
        The hidden states after each step, ``(steps, batch, size)``. Half precision is computed in
        float32.
    """
    return relax.Call(Op.get("relax.grad.rnn_relu"), [data, hidden, weight])


def recurrent_backward(
    output_grad: relax.Expr,
    slopes: relax.Expr,
    weight: relax.Expr,
    cells_grad: relax.Expr | None = None,
) -> relax.Call:
    """Gradient of the recurrence of a layer, from the last step to the first.

    The extents of ``slopes`` and ``weight`` determine the kind of the layer.

    Parameters
    ----------
    output_grad : relax.Expr
        The gradient with respect to the hidden states, ``(steps, batch, size)``.
    slopes : relax.Expr
        The slopes that the recurrence returns, or the slopes of an RNN, ``(steps, batch, size)``.
    weight : relax.Expr
        The recurrent weight.
    cells_grad : relax.Expr, optional
        The gradient with respect to the cells of an LSTM; 0 by default.

    Returns
    -------
    result : relax.Call
        The gradients with respect to the products with the recurrent weight,
        ``(steps, batch, gates * size)``, and to the cells of an LSTM or the hidden states of the
        others, through all later steps, ``(steps, batch, size)``. Then the gradients of the initial
        hidden state, and of the initial cell of an LSTM. Half precision is computed in float32.
    """
    others = [] if cells_grad is None else [cells_grad]
    return relax.Call(
        Op.get("relax.grad.recurrent_backward"), [output_grad, slopes, weight, *others]
    )


def recurrent_tangent(
    gates: relax.Expr,
    states: relax.Expr,
    hidden: relax.Expr,
    slopes: relax.Expr,
    weight: relax.Expr,
    cell: relax.Expr | None = None,
) -> relax.Call:
    """Derivative of the recurrence of a layer along a direction, the transpose of
    :func:`recurrent_backward`.

    Parameters
    ----------
    gates : relax.Expr
        The direction of the products with the recurrent weight, ``(steps, batch, gates * size)``.
    states : relax.Expr
        That of the cells of an LSTM or the hidden states of the others, ``(steps, batch, size)``.
    hidden : relax.Expr
        That of the initial hidden state, ``(batch, size)``.
    slopes, weight
        As for :func:`recurrent_backward`.
    cell : relax.Expr, optional
        The direction of the initial cell, for an LSTM only.

    Returns
    -------
    result : relax.Call
        The derivatives of the hidden states, of the sums of the gates, and of the cells of an LSTM.
        Half precision is computed in float32.
    """
    others = [] if cell is None else [cell]
    return relax.Call(
        Op.get("relax.grad.recurrent_tangent"), [gates, states, hidden, slopes, weight, *others]
    )


def previous_steps(data: relax.Expr, initial: relax.Expr) -> relax.Call:
    """Values of the step before each step.

    A slice and a concatenation would have extents that no analysis simplifies, if the number of
    steps is symbolic.

    Parameters
    ----------
    data : relax.Expr
        A tensor whose first axis is the steps.
    initial : relax.Expr
        The value before the first step, of the shape without that axis.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``: ``initial``, and then all values but the last one.
    """
    return relax.Call(Op.get("relax.grad.previous_steps"), [data, initial])


def next_steps(data: relax.Expr) -> relax.Call:
    """Values of the step after each step, the transpose of :func:`previous_steps`.

    Parameters
    ----------
    data : relax.Expr
        A tensor whose first axis is the steps.

    Returns
    -------
    result : relax.Call
        A tensor of the type of ``data``: all values but the first one, and then 0.
    """
    return relax.Call(Op.get("relax.grad.next_steps"), [data])


def slopes_of(slopes: relax.Expr, weight: relax.Expr) -> int:
    """Return the number of slopes of each unit of a layer, the key of :data:`GATES`."""
    shapes = [operand.ty.shape for operand in (slopes, weight)]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        raise ValueError("the shapes of slopes and weight must be known; give them with match_cast")
    (*_, wide), (rows, size) = (list(shape.values) for shape in shapes)
    analyzer = Analyzer()
    for count, gates in GATES.items():
        if analyzer.can_prove_equal(wide, size * count) and analyzer.can_prove_equal(
            rows, size * gates
        ):
            return count
    raise ValueError(
        "slopes and weight must have the extents 6 * size and (4 * size, size) for an LSTM, 4 * "
        "size and (3 * size, size) for a GRU, 5 * size and (3 * size, size) for a GRU that "
        "resets first, or size and (size, size) for an RNN, but their shapes are "
        + " and ".join(shape_text(shape.values) for shape in shapes)
    )


def _tensors(call: relax.Call, ranks: dict[str, int]) -> list[relax.TensorType]:
    """Return the types of the arguments, which must have these names, ranks and one floating-point
    dtype."""
    names = list(ranks)[: len(call.args)]
    kinds = [tensor_type(call, i, name) for i, name in enumerate(names)]
    for name, kind in zip(names, kinds, strict=True):
        if kind.ndim != ranks[name] or not isinstance(kind.shape, relax.ShapeExpr):
            raise ValueError(
                f"{call.op.name}: {name} must have {ranks[name]} dimensions of known extents, "
                f"but its type is {kind}"
            )
        if kind.dtype is None or dtype_of(kind) != dtype_of(kinds[0]):
            raise ValueError(
                f"{call.op.name}: {name} must have the dtype of {names[0]}, whose type is "
                f"{kinds[0]}, but its type is {kind}"
            )
        if not dtype_of(kind).startswith(("float", "bfloat")):
            raise ValueError(
                f"{call.op.name}: {name} must be of floating-point numbers, but its type is {kind}"
            )
    return kinds


def _check(
    call: relax.Call, name: str, kind: relax.TensorType, extents: Sequence[tirx.PrimExpr]
) -> None:
    """Check that an argument has given extents."""
    shape, analyzer = list(kind.shape.values), Analyzer()
    if not all(map(analyzer.can_prove_equal, shape, extents)):
        described = ", ".join(
            f"{info.name}: {argument.ty}"
            for info, argument in zip(call.op.arguments, call.args, strict=False)
        )
        raise ValueError(
            f"{call.op.name}: {name} must have the shape {shape_text(list(extents))}, by the "
            f"other arguments, but it has {shape_text(shape)}; the arguments are {described}"
        )


_RANKS = {"data": 3, "hidden": 2, "cell": 2, "weight": 2, "bias": 1}


def _infer_layer(
    call: relax.Call, names: Sequence[str], gates: int
) -> tuple[relax.TensorType, list, tirx.PrimExpr]:
    """Check the arguments of a layer, and return the type of its data, the steps and the batch, and
    the size."""
    kinds = dict(zip(names, _tensors(call, {name: _RANKS[name] for name in names}), strict=True))
    data = kinds["data"]
    steps, batch, _ = data.shape.values
    size = kinds["weight"].shape.values[1]
    expected = {
        "data": [steps, batch, size * gates],
        "hidden": [batch, size],
        "cell": [batch, size],
        "weight": [size * gates, size],
        "bias": [size],
    }
    for name, kind in kinds.items():
        _check(call, name, kind, expected[name])
    return data, [steps, batch], size


def _infer_lstm(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data, outer, size = _infer_layer(call, ("data", "hidden", "cell", "weight"), 4)
    states = _like(data, [*outer, size])
    return relax.TupleType([states, states, _like(data, [*outer, size * 6])])


def _infer_gru(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    names = ("data", "hidden", "weight", "bias")[: len(call.args)]
    data, outer, size = _infer_layer(call, names, 3)
    states = _like(data, [*outer, size])
    if "bias" not in names:
        return relax.TupleType([states, _like(data, [*outer, size * 5])])
    return relax.TupleType([states, _like(data, [*outer, size * 4]), states])


def _infer_rnn(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data, outer, size = _infer_layer(call, ("data", "hidden", "weight"), 1)
    return _like(data, [*outer, size])


def _infer_backward(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    ranks = {"output_grad": 3, "slopes": 3, "weight": 2, "cells_grad": 3}
    output_grad, slopes, weight, *cells = _tensors(call, ranks)
    count = _slopes_of(call)
    steps, batch, _ = slopes.shape.values
    rows, size = weight.shape.values
    _check(call, "output_grad", output_grad, [steps, batch, size])
    _only_of_lstm(call, count, "cells_grad", cells)
    for cell in cells:
        _check(call, "cells_grad", cell, [steps, batch, size])
    states, initial = _like(output_grad, [steps, batch, size]), _like(output_grad, [batch, size])
    gates = _like(output_grad, [steps, batch, rows])
    return relax.TupleType([gates, states, initial, *([initial] if count == 6 else [])])


def _infer_tangent(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    ranks = {"gates": 3, "states": 3, "hidden": 2, "slopes": 3, "weight": 2, "cell": 2}
    gates, states, hidden, slopes, weight, *cell = _tensors(call, ranks)
    count = _slopes_of(call)
    steps, batch, _ = slopes.shape.values
    rows, size = weight.shape.values
    _check(call, "gates", gates, [steps, batch, rows])
    _check(call, "states", states, [steps, batch, size])
    _check(call, "hidden", hidden, [batch, size])
    _only_of_lstm(call, count, "cell", cell)
    if count == 6 and not cell:
        raise ValueError(f"{call.op.name}: cell must be given for an LSTM")
    for tensor in cell:
        _check(call, "cell", tensor, [batch, size])
    of_states = _like(gates, [steps, batch, size])
    return relax.TupleType([of_states, gates, *([of_states] if count == 6 else [])])


def _infer_previous(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data, initial = tensor_type(call, 0, "data"), tensor_type(call, 1, "initial")
    _has_steps(call, data)
    if initial.dtype is None or dtype_of(initial) != dtype_of(data):
        raise ValueError(
            f"{call.op.name}: initial must have the dtype of data, whose type is {data}, but its "
            f"type is {initial}"
        )
    if initial.ndim != data.ndim - 1 or not isinstance(initial.shape, relax.ShapeExpr):
        raise ValueError(
            f"{call.op.name}: initial must have the shape of data, whose type is {data}, without "
            f"the first axis, but its type is {initial}"
        )
    _check(call, "initial", initial, list(data.shape.values)[1:])
    return data


def _infer_next(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
    data = tensor_type(call, 0, "data")
    _has_steps(call, data)
    return data


def _has_steps(call: relax.Call, data: relax.TensorType) -> None:
    if not isinstance(data.shape, relax.ShapeExpr) or data.ndim < 1 or data.dtype is None:
        raise ValueError(
            f"{call.op.name}: data must have an axis of steps, known extents and a dtype, but "
            f"its type is {data}"
        )


def _slopes_of(call: relax.Call) -> int:
    index = 1 if call.op.name == "relax.grad.recurrent_backward" else 3
    try:
        return slopes_of(*call.args[index : index + 2])
    except ValueError as error:
        raise ValueError(f"{call.op.name}: {error}") from None


def _only_of_lstm(call: relax.Call, count: int, name: str, operands: Sequence) -> None:
    if operands and count != 6:
        raise ValueError(
            f"{call.op.name}: {name} must not be given: the slopes have {count} parts, and only "
            "the 6 of an LSTM belong to a cell"
        )


def _like(kind: relax.TensorType, extents: Sequence[tirx.PrimExpr]) -> relax.TensorType:
    shape = [Analyzer().simplify(extent) for extent in extents]
    return type_of_shape(kind, shape, len(shape))


_DATA = ("data", "Tensor", "The products of the inputs and the input weight, with biases.")
_HIDDEN = ("hidden", "Tensor", "The initial hidden state.")
_WEIGHT = ("weight", "Tensor", "The recurrent weight.")
_SLOPES = ("slopes", "Tensor", "The slopes of the layer.")

declare_op(
    "lstm",
    [_DATA, _HIDDEN, ("cell", "Tensor", "The initial cell."), _WEIGHT],
    _infer_lstm,
    lstm,
)
declare_op(
    "gru",
    [_DATA, _HIDDEN, _WEIGHT, ("bias", "Optional[Tensor]", "The recurrent bias of the gate n.")],
    _infer_gru,
    gru,
)
declare_op("rnn_tanh", [_DATA, _HIDDEN, _WEIGHT], _infer_rnn, rnn_tanh)
declare_op("rnn_relu", [_DATA, _HIDDEN, _WEIGHT], _infer_rnn, rnn_relu)
declare_op(
    "recurrent_backward",
    [
        ("output_grad", "Tensor", "The gradient with respect to the hidden states."),
        _SLOPES,
        _WEIGHT,
        ("cells_grad", "Optional[Tensor]", "The gradient with respect to the cells."),
    ],
    _infer_backward,
    recurrent_backward,
)
declare_op(
    "recurrent_tangent",
    [
        ("gates", "Tensor", "The direction of the products with the recurrent weight."),
        ("states", "Tensor", "The direction of the states."),
        _HIDDEN,
        _SLOPES,
        _WEIGHT,
        ("cell", "Optional[Tensor]", "The direction of the initial cell."),
    ],
    _infer_tangent,
    recurrent_tangent,
)
declare_op(
    "previous_steps",
    [
        ("data", "Tensor", "The values of each step."),
        ("initial", "Tensor", "The value before the first step."),
    ],
    _infer_previous,
    previous_steps,
)
declare_op("next_steps", [("data", "Tensor", "The values of each step.")], _infer_next, next_steps)
