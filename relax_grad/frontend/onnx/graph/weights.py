"""The role of each constant of an ONNX graph: weight, running statistic, or constant."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
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
    graph = model.graph
    uses = _Uses(graph, types, opset_of(model))
    floats = [
        tensor
        for tensor in graph.initializer
        if is_float_type(tensor.data_type) and tensor.name not in folded
    ]
    uses.check(floats)
    possible = [
        tensor
        for tensor in floats
        if tensor.name in uses.operands
        and tensor.name not in uses.statistics
        and math.prod(tensor.dims)
    ]
    chosen = choices(
        graph,
        types,
        [tensor.name for tensor in possible],
        constants,
        arrays,
        exponents=uses.only_exponents,
    )
    for tensor in possible:
        chosen[tensor.name] = _own_choice(tensor, chosen[tensor.name], uses.settings)
    weights, frozen, optional = [], [], []
    for tensor in possible:
        name = tensor.name
        if chosen[name].is_trained:
            weights.append(name)
        elif math.prod(tensor.dims) == 1 or name in uses.only_exponents:
            optional.append(name)
        else:
            frozen.append(name)
    names = {tensor.name for tensor in floats}
    return Roles(
        weights,
        frozen,
        optional,
        statistics=[tensor.name for tensor in floats if tensor.name in uses.statistics],
        states={name: new for name, new in uses.states.items() if name in names},
        settings={name: user for name, user in uses.settings.items() if name in names},
        cut={name: end for name, end in uses.cut.items() if name in names and name not in chosen},
        choices=chosen,
        integers={},
        copies={},
        equal={},
    )


def _own_choice(tensor: onnx.TensorProto, choice: Choice, settings: Mapping[str, str]) -> Choice:
    """Return the choice of a tensor, which is not trained if it is a setting of another node."""
    user = settings.get(tensor.name)
    is_weight = choice.reason.startswith("it is a weight")
    if user is None or math.prod(tensor.dims) > 1 or is_weight:
        return choice
    return Choice(False, f"it is a bound or a scale of {user} too")


class _Uses:
    """What the values of a graph are for, of which gradients flow back from its results.

    Parameters
    ----------
    graph : onnx.GraphProto
        The outer graph. The statistics that it updates get names.
    types : Mapping[str, onnx.TypeProto]
        The types of the values.
    opset : int
        The version of the operators.
    """

    def __init__(self, graph: onnx.GraphProto, types: Mapping[str, onnx.TypeProto], opset: int):
        self._types, self._opset = types, opset
        self._outer = {name for node in graph.node for name in node.output}
        self._reached = {output.name for output in graph.output}
        self._data: set[str] = set()
        self._exponents: set[str] = set()
        self.statistics: set[str] = set()
        self.states: dict[str, str] = {}
        self.settings: dict[str, str] = {}
        self.cut: dict[str, str] = {}
        for node in reversed(list(flat_nodes(graph))):
            if self._takes_gradient(node):
                self._add_node(node)
            else:
                self._cut_at(node)

    @property
    def operands(self) -> set[str]:
        """The values that a gradient reaches."""
        return self._data | self._exponents

    @property
    def only_exponents(self) -> set[str]:
        """The values that are exponents, and nothing else."""
        return self._exponents - self._data

    def check(self, tensors: Iterable[onnx.TensorProto]) -> None:
        """Raise ValueError for a running statistic that is an operand of another kind."""
        for tensor in tensors:
            if tensor.name in self.statistics and tensor.name in self._data:
                raise ValueError(
                    f"{tensor.name} is a running statistic and an operand of another kind; give "
                    "the normalisation a copy"
                )

    def _is_float(self, name: str) -> bool:
        return is_float(self._types.get(name))

    def _takes_gradient(self, node: onnx.NodeProto) -> bool:
        """Tell whether a gradient passes through a node."""
        return node.op_type not in _ENDS and any(
            name in self._reached and self._is_float(name) for name in node.output
        )

    def _cut_at(self, node: onnx.NodeProto) -> None:
        """Note where the gradient of the operands of a node ends: at the node, or after it."""
        end = next((self.cut[name] for name in node.output if name in self.cut), None)
        for name in node.input:
            self.cut.setdefault(name, end or f"{node.op_type} {label(node)}")

    def _add_node(self, node: onnx.NodeProto) -> None:
        """Note the uses of the operands of a node."""
        for inner in subgraphs(node):
            results = {output.name for output in inner.output}
            self._reached |= results
            self._data |= results
        fixed = _SETTINGS.get(node.op_type, set())
        for position, name in enumerate(node.input):
            if not name or not self._is_float(name):
                continue
            if fixed is None or position in fixed:
                self.settings[name] = label(node)
                continue
            self._reached.add(name)
            if position in _STATISTICS.get(node.op_type, ()):
                self.statistics.add(name)
            elif position in _CONSTANT_BY_DEFAULT.get(node.op_type, ()):
                self._exponents.add(name)
            else:
                self._data.add(name)
        is_outer = any(name in self._outer for name in node.output if name)
        if is_outer and node.op_type == "BatchNormalization" and is_training(node, self._opset):
            _add_states(node, self.states)


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
