"""The role of each constant of an ONNX graph: weight, running statistic, or constant."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import onnx

from .._arguments import Copy
from ..read.load import Arrays
from ..read.nodes import attribute, is_float, is_float_type, label, opset_of, subgraphs
from .uses import Choice, choices, flat_nodes

#: The operands that are shapes, bounds, axes, scales or probabilities, which stay constants. None
#: stands for all operands.
_SETTINGS: dict[str, set[int] | None] = {
    "AffineGrid": {1},
    "Clip": {1, 2},
    "ConstantOfShape": {0},
    "CumSum": {1},
    "DequantizeLinear": {1, 2},
    "Dropout": {1, 2},
    "Expand": {1},
    "EyeLike": None,
    "FakeQuantize": {1, 2},
    "MatMulNBits": {2, 3},
    "MaxUnpool": {2},
    "NegativeLogLikelihoodLoss": {2},
    "NonMaxSuppression": {2, 3, 4},
    "OneHot": {1, 2},
    "Pad": {1, 2, 3},
    "QuantizeLinear": {1, 2},
    "Range": None,
    "Reshape": {1},
    "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "SoftmaxCrossEntropyLoss": {2},
    "Split": {1},
    "Squeeze": {1},
    "Tile": {1},
    "TopK": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
    "Upsample": {1},
}

#: Operands that are constants by default: the derivative of an exponent is undefined for negative
#: bases.
_CONSTANT_BY_DEFAULT = {"Pow": {1}}

#: Operators with floating-point results through which no gradient passes.
_ENDS = {"DynamicQuantizeLinear"}

#: The operands that are running statistics.
_STATISTICS = {"BatchNormalization": (3, 4)}


class Roles(NamedTuple):
    """The roles of the floating-point initializers of a graph, by their names in the order of the
    graph.

    Attributes
    ----------
    weights : list[str]
        The constants that are parameters by default.
    frozen : list[str]
        The constants with several elements that are not.
    optional : list[str]
        The numbers and exponents that are parameters only on request, and constants of the program
        otherwise.
    statistics : list[str]
        The running means and variances of normalisations.
    states : dict[str, str]
        The statistics that the model updates, with the names of their new values.
    settings : dict[str, str]
        The shapes, bounds and scales, with the label of a node that uses them.
    cut : dict[str, str]
        Those that no gradient reaches, with the node at which it ends.
    choices : dict[str, Choice]
        Whether each of the weights and of the frozen and optional constants is trained by default,
        and why.
    integers : dict[str, str]
        The tensors of integers that are weights, with a node that takes them.
    copies : dict[str, Copy]
        The tensors that train as others.
    equal : dict[str, Copy]
        The weights with the values of others, which train apart.
    """

    weights: list[str]
    frozen: list[str]
    optional: list[str]
    statistics: list[str]
    states: dict[str, str]
    settings: dict[str, str]
    cut: dict[str, str]
    choices: dict[str, Choice]
    integers: dict[str, str]
    copies: dict[str, Copy]
    equal: dict[str, Copy]


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
    arrays: Arrays,
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
    arrays : Arrays
        The values of large tensors.
    """
    graph, opset = model.graph, opset_of(model)
    data, exponents, statistics = set(), set(), set()
    states: dict[str, str] = {}
    settings: dict[str, str] = {}
    cut: dict[str, str] = {}
    outer = {name for node in graph.node for name in node.output}
    reached = {output.name for output in graph.output}
    for node in reversed(list(flat_nodes(graph))):
        if node.op_type in _ENDS or not any(
            name in reached and is_float(types.get(name)) for name in node.output
        ):
            end = next((cut[name] for name in node.output if name in cut), None)
            for name in node.input:
                cut.setdefault(name, end or f"{node.op_type} {label(node)}")
            continue
        for inner in subgraphs(node):
            reached |= {output.name for output in inner.output}
            data |= {output.name for output in inner.output}
        fixed = _SETTINGS.get(node.op_type, set())
        for position, name in enumerate(node.input):
            if not name or not is_float(types.get(name)):
                continue
            if fixed is None or position in fixed:
                settings[name] = label(node)
                continue
            reached.add(name)
            if position in _STATISTICS.get(node.op_type, ()):
                statistics.add(name)
            elif position in _CONSTANT_BY_DEFAULT.get(node.op_type, ()):
                exponents.add(name)
            else:
                data.add(name)
        is_outer = any(name in outer for name in node.output if name)
        if is_outer and node.op_type == "BatchNormalization" and is_training(node, opset):
            _add_states(node, states)
    floats = [tensor for tensor in graph.initializer if is_float_type(tensor.data_type)]
    floats = [tensor for tensor in floats if tensor.name not in folded]
    for tensor in floats:
        if tensor.name in statistics and tensor.name in data:
            raise ValueError(
                f"{tensor.name} is a running statistic and an operand of another kind; give the "
                "normalisation a copy"
            )
    names = {tensor.name for tensor in floats}
    possible = [
        tensor for tensor in floats if tensor.name in data | exponents and math.prod(tensor.dims)
    ]
    possible = [tensor for tensor in possible if tensor.name not in statistics]
    choice_of = choices(
        graph, types, [tensor.name for tensor in possible], constants, arrays, exponents - data
    )
    weights, frozen, optional = [], [], []
    for tensor in possible:
        name = tensor.name
        is_number = math.prod(tensor.dims) == 1
        choice = choice_of[name]
        if is_number and name in settings and not choice.reason.startswith("it is a weight"):
            choice = choice_of[name] = Choice(
                False, f"it is a bound or a scale of {settings[name]} too"
            )
        if choice.is_trained:
            weights.append(name)
        elif is_number or name in exponents - data:
            optional.append(name)
        else:
            frozen.append(name)
    in_order = [tensor.name for tensor in floats if tensor.name in statistics]
    return Roles(
        weights,
        frozen,
        optional,
        in_order,
        {name: new for name, new in states.items() if name in names},
        {name: user for name, user in settings.items() if name in names},
        {name: end for name, end in cut.items() if name in names and name not in choice_of},
        choice_of,
        {},
        {},
        {},
    )


def _add_states(node: onnx.NodeProto, states: dict[str, str]) -> None:
    """Enter the statistics that a normalisation updates, and name their new values where they have
    no name."""
    for position in (3, 4):
        name = node.input[position]
        if name in states:
            raise ValueError(
                f"two normalisations update the running statistic {name}; give each a separate copy"
            )
        number = position - 2
        while len(node.output) <= number:
            node.output.append("")
        if not node.output[number]:
            node.output[number] = f"{name}//updated"
        states[name] = node.output[number]
