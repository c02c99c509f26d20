"""The role of each constant of an ONNX graph: weight, running statistic, or constant."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import onnx

from ._graph import attribute, is_float, is_float_type, label, opset_of, subgraphs

#: The operands that are shapes, bounds, axes, scales or probabilities, which stay constants. None stands for all operands.
_SETTINGS: dict[str, set[int] | None] = {
    "AffineGrid": {1},
    "Clip": {1, 2},
    "ConstantOfShape": {0},
    "CumSum": {1},
    "DequantizeLinear": {1, 2},
    "Dropout": {1, 2},
    "Expand": {1},
    "EyeLike": None,
    "MaxUnpool": {2},
    "NonMaxSuppression": {2, 3, 4},
    "OneHot": {1, 2},
    "Pad": {1, 2, 3},
    "QuantizeLinear": {1, 2},
    "Range": None,
    "Reshape": {1},
    "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "Split": {1},
    "Squeeze": {1},
    "Tile": {1},
    "TopK": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
    "Upsample": {1},
}

#: Operands that are constants by default: the derivative of an exponent is undefined for negative bases.
_CONSTANT_BY_DEFAULT = {"Pow": {1}}

#: The operands that are running statistics.
_STATISTICS = {"BatchNormalization": (3, 4)}

#: Operators whose operands other than the first are weights, even of one element.
_LAYERS = {
    "BatchNormalization",
    "Conv",
    "ConvTranspose",
    "Gemm",
    "GRU",
    "GroupNormalization",
    "InstanceNormalization",
    "LSTM",
    "LayerNormalization",
    "MatMul",
    "PRelu",
    "RMSNormalization",
}


#: The names that exporters generate for constants of the program, which some of them write as initializers: ``Const_4:0``
#: and ``log/add/y`` (TensorFlow and JAX), ``a/truediv;a/Log`` (TFLite, except variables), ``auto.cast.7`` (Paddle),
#: ``val_7`` (PyTorch), ``/model/Constant_output_0``, ``onnx::Mul_12``, ``123``.
_GENERATED = re.compile(
    r"(?i)(^|[/_.])const(ant|[_:\d]|$)|:\d+$|/[xy]($|;)|^(?!.*ReadVariableOp).*;|^auto\.\w+\.\d+$"
    r"|^val_\d+$|^onnx::|^_*\d+$"
)


class Roles(NamedTuple):
    """The roles of the floating-point initializers of a graph, by their names in the order of the graph.

    Attributes
    ----------
    weights : list[str]
        The constants that are parameters by default.
    optional : list[str]
        The constants that are parameters only on request: exponents, and scalars in ``Constant`` nodes or with names
        that exporters generate, such as the epsilon of a normalisation.
    statistics : list[str]
        The running means and variances of normalisations.
    states : dict[str, str]
        The statistics that the model updates, with the names of their new values.
    settings : dict[str, str]
        The shapes, bounds and scales, with the label of a node that uses them.
    """

    weights: list[str]
    optional: list[str]
    statistics: list[str]
    states: dict[str, str]
    settings: dict[str, str]


def is_training(node: onnx.NodeProto, opset: int) -> bool:
    """Tell whether a BatchNormalization uses the statistics of the batch."""
    if opset >= 14:
        return bool(attribute(node, "training_mode", 0))
    if opset < 7:
        return not attribute(node, "is_test", 0)
    return len([name for name in node.output[1:] if name]) > 0


def roles_of(
    model: onnx.ModelProto,
    types: Mapping[str, onnx.TypeProto],
    constants: Collection[str],
    folded: Collection[str],
) -> Roles:
    """Return the roles of the initializers of the outer graph.

    Parameters
    ----------
    model : onnx.ModelProto
        The model.
    types : Mapping[str, onnx.TypeProto]
        The types of the values.
    constants : Collection[str]
        The initializers that were ``Constant`` nodes.
    folded : Collection[str]
        The initializers that replace folded values; they have no role.
    """
    graph, opset = model.graph, opset_of(model)
    data, layers, optional, statistics = set(), set(), set(), set()
    states: dict[str, str] = {}
    settings: dict[str, str] = {}
    reached = {each.name for each in graph.output}
    for node in reversed(graph.node):
        if not any(name in reached and is_float(types.get(name)) for name in node.output):
            for name in node.input:
                settings.setdefault(name, label(node))
            continue
        fixed = _SETTINGS.get(node.op_type, set())
        for position, name in enumerate(node.input):
            if not name or not is_float(types.get(name)):
                continue
            if fixed is None or position in fixed:
                settings[name] = label(node)
            elif position in _STATISTICS.get(node.op_type, ()):
                statistics.add(name)
                reached.add(name)
            elif position in _CONSTANT_BY_DEFAULT.get(node.op_type, ()):
                optional.add(name)
                reached.add(name)
            else:
                data.add(name)
                reached.add(name)
                if node.op_type in _LAYERS and position > 0:
                    layers.add(name)
        for inner in subgraphs(node):
            inside = {name for each in inner.node for name in each.input}
            inside |= {each.name for each in inner.output}
            data |= inside
            reached |= inside
        if node.op_type == "BatchNormalization" and is_training(node, opset):
            _add_states(node, states)
    floats = [each for each in graph.initializer if is_float_type(each.data_type)]
    floats = [each for each in floats if each.name not in folded]
    names = {each.name for each in floats}
    weights, possible = [], []
    for each in floats:
        name, count = each.name, math.prod(each.dims)
        if name in statistics:
            if name in data:
                raise ValueError(
                    f"{name} is a running statistic and an operand of another kind; give the normalisation a copy"
                )
        elif name in data or name in optional:
            is_scalar = count == 1 and len(each.dims) < 2 and name not in layers
            is_setting = name in constants or name in settings or _GENERATED.search(name)
            if count > 0 and name in data and not (is_scalar and is_setting):
                weights.append(name)
            else:
                possible.append(name)
    in_order = [each.name for each in floats if each.name in statistics]
    return Roles(
        weights,
        possible,
        in_order,
        {name: new for name, new in states.items() if name in names},
        {name: user for name, user in settings.items() if name in names},
    )


def _add_states(node: onnx.NodeProto, states: dict[str, str]) -> None:
    """Enter the statistics that a normalisation updates, and name their new values where they have no name."""
    for position in (3, 4):
        name = node.input[position]
        if name in states:
            raise ValueError(
                f"two normalisations update the running statistic {name}; give each a copy of its own"
            )
        number = position - 2
        while len(node.output) <= number:
            node.output.append("")
        if not node.output[number]:
            node.output[number] = f"{name}//updated"
        states[name] = node.output[number]
