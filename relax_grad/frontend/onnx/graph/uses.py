"""The constants of an ONNX graph that a training framework made parameters, by their use, their
names, and their values (:mod:`.tables`)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import onnx

from ..read.load import Arrays
from ..read.nodes import is_float, label, operands, subgraphs
from .tables import stands_for_none, table_reason


class Choice(NamedTuple):
    """Whether a constant is trained by default, and the reason."""

    is_trained: bool
    reason: str


#: The operands of layers that are weights or biases.
_WEIGHTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "BiasAdd": (1,),
    "BiasDropout": (1,),
    "BiasGelu": (1,),
    "BiasSplitGelu": (1,),
    "CausalConvWithState": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "EmbedLayerNormalization": (2, 3, 4, 5, 6),
    "FastGelu": (1,),
    "FusedConv": (1, 2),
    "FusedGemm": (0, 1, 2),
    "FusedMatMul": (0, 1),
    "FusedMatMulActivation": (0, 1),
    "GRU": (1, 2, 3),
    "GatedRMSNorm": (1,),
    "GatedRelativePositionBias": (1, 3, 4, 5),
    "Gemm": (0, 1, 2),
    "GemmFastGelu": (0, 1, 2),
    "GroupNorm": (1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "LinearAttentionGate": (1, 2),
    "MatMul": (0, 1),
    "MatMulNBits": (5,),
    "MultiHeadAttention": (3,),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
    "SimplifiedLayerNormalization": (1,),
    "SkipGroupNorm": (1, 2, 4),
    "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
    "TransposeMatMul": (0, 1),
}

#: The operands of attention that are weights, in the domain ``com.microsoft``; in ONNX's own domain
#: they are data.
_MICROSOFT_ATTENTION = (1, 2)

#: Operators of which a constant first operand is an embedding.
_LOOKUPS = {"Gather", "GatherElements", "GatherND"}

#: Operators that change the layout or the dtype of their first operand.
_VIEWS = {
    "Cast",
    "Expand",
    "FakeQuantize",
    "Flatten",
    "Identity",
    "Reshape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}

#: Operators that pass a root on, such as of the variance in a normalisation.
_PASS_A_ROOT = {*_VIEWS, "Add", "Clip", "Max", "Reciprocal"}

#: Normalisations that a scale and a bias may follow.
_NORMALIZATIONS = {"InstanceNormalization", "LpNormalization", "MeanVarianceNormalization"}

#: Words at the end of the names of parameters.
_PARAMETER_WORDS = {
    "alpha",
    "b",
    "beta",
    "bias",
    "biases",
    "cls",
    "codebook",
    "embed",
    "embedding",
    "embeddings",
    "g",
    "gamma",
    "gate",
    "kernel",
    "lambda",
    "latents",
    "param",
    "parameter",
    "pos",
    "prompt",
    "queries",
    "query",
    "scale",
    "slope",
    "temp",
    "temperature",
    "theta",
    "token",
    "tokens",
    "u",
    "v",
    "w",
    "weight",
    "weights",
}

#: Words in the names of buffers and of constants of the program.
_BUFFER_WORDS = {
    "anchor",
    "anchors",
    "basis",
    "blur",
    "buffer",
    "cached",
    "cis",
    "const",
    "constant",
    "cos",
    "dct",
    "dft",
    "eps",
    "epsilon",
    "fbank",
    "fft",
    "filterbank",
    "freq",
    "freqs",
    "frequencies",
    "gaussian",
    "grid",
    "mask",
    "mean",
    "mel",
    "rope",
    "rotary",
    "sin",
    "sobel",
    "std",
    "stft",
    "var",
    "variance",
    "window",
}

#: The names that exporters generate for constants of the program, which some of them write as
#: initializers: ``Const_4:0`` and ``log/add/y`` (TensorFlow and JAX), ``a/truediv;a/Log`` (TFLite,
#: except variables), ``auto.cast.7`` (Paddle), ``val_7`` (PyTorch), ``/model/Constant_output_0``,
#: ``onnx::Mul_12``, ``123``.
_GENERATED = re.compile(
    r"(?i)(^|[/_.])const(ant|[_:\d]|$)|:\d+$|/[xy]($|;)|;|^auto\.\w+\.\d+$|^val_\d+$|^onnx::|^_*\d+$"
)

#: TensorFlow reads variables by an operator of this name.
_VARIABLE = "ReadVariableOp"


def of_name(name: str) -> Choice | None:
    """Return the choice that the name of a constant suggests, or None."""
    if _VARIABLE in name:
        return Choice(True, "it has the name of a variable")
    if _GENERATED.search(name):
        return None
    last = re.split(r"[./]", name)[-1]
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", last).lower()
    words = [word.rstrip("0123456789") for word in re.split(r"[\W_]+", spaced)]
    words = [word for word in words if word]
    if words and words[-1] in _PARAMETER_WORDS:
        return Choice(True, "it has the name of a parameter")
    if not _BUFFER_WORDS.isdisjoint(words):
        return Choice(False, "it has the name of a constant table or setting")
    if "." in name and not name.startswith("/"):
        return Choice(True, "it has the name of a module's parameter")
    return None


def choices(
    graph: onnx.GraphProto,
    types: Mapping[str, onnx.TypeProto],
    names: Collection[str],
    in_nodes: Collection[str],
    arrays: Arrays,
    exponents: Collection[str] = (),
) -> dict[str, Choice]:
    """Return whether constants are trained by default.

    Parameters
    ----------
    graph : onnx.GraphProto
        The outer graph.
    types : Mapping[str, onnx.TypeProto]
        The types of its values.
    names : Collection[str]
        The floating-point initializers that a gradient reaches.
    in_nodes : Collection[str]
        The initializers that were ``Constant`` nodes.
    arrays : Arrays
        The values of large tensors.
    exponents : Collection[str]
        The initializers that are exponents, and nothing else.
    """
    tensors = {initializer.name: initializer for initializer in graph.initializer}
    numbers = {name for name in in_nodes if name in tensors and math.prod(tensors[name].dims) == 1}
    uses = _Uses(graph, types, set(names), numbers)
    choice_of = {}
    for name in names:
        tensor = tensors[name]
        is_scalar = math.prod(tensor.dims) == 1 and len(tensor.dims) < 2
        suggested = of_name(name)
        used = uses.layers.get(name)
        if name in exponents:
            choice = Choice(False, "it is an exponent")
        elif suggested is not None and not suggested.is_trained:
            choice = suggested
        elif name in uses.frequencies:
            choice = Choice(
                False, "it is a table of frequencies, of whose product sine and cosine are taken"
            )
        elif used is not None and name in uses.affine and stands_for_none(tensor, name, arrays):
            choice = Choice(False, "it is ones or zeros for a weight that the layer lacks")
        elif used is not None:
            choice = Choice(True, used)
        elif is_scalar and name in in_nodes:
            choice = Choice(False, "it is a scalar in a Constant node")
        elif suggested is not None:
            choice = suggested
        else:
            kind = "a scalar" if is_scalar else "an operand"
            choice = Choice(
                False,
                f"it is {kind} of {uses.first.get(name, 'the outputs')}, and no weight of a layer",
            )
        if choice.is_trained:
            table = table_reason(tensor, arrays)
            choice = choice if table is None else Choice(False, table)
        choice_of[name] = choice
    return choice_of


def flat_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes in the order of their values: nodes of inner graphs before the node that has
    the graph."""
    for node in graph.node:
        for inner in subgraphs(node):
            yield from flat_nodes(inner)
        yield node


class _Uses:
    """The uses of the constants of a graph.

    Attributes
    ----------
    layers : dict[str, str]
        The constants that are weights, with their uses.
    first : dict[str, str]
        The first node that uses a constant.
    affine : set[str]
        The constants that are scales and biases of normalisations.
    frequencies : set[str]
        The constants whose products with data go to a sine and a cosine only.
    """

    def __init__(self, graph: onnx.GraphProto, types: Mapping, names: set[str], numbers: set[str]):
        self.layers: dict[str, str] = {}
        self.first: dict[str, str] = {}
        self.affine: set[str] = set()
        self.frequencies: set[str] = set()
        self._types, self._numbers = types, numbers
        self._sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
        self._ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
        #: The constants of which values that need no input are computed.
        self._leaves: dict[str, frozenset[str]] = {name: frozenset([name]) for name in names}
        self._varying = {value.name for value in graph.input}
        #: Results of layers, of roots, and of divisions by roots.
        self._after: set[str] = set()
        self._roots: set[str] = set()
        self._normal: set[str] = set()
        nodes = list(flat_nodes(graph))
        self._users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in nodes:
            for name in node.input:
                self._users[name].append(node)
        for node in nodes:
            self._visit(node)

    def _visit(self, node: onnx.NodeProto) -> None:
        kind = node.op_type
        for inner in subgraphs(node):
            self._varying.update(value.name for value in inner.input)
        for name in node.input:
            if name in self._leaves:
                for leaf in self._leaves[name]:
                    self.first.setdefault(leaf, f"the {kind} {label(node)}")
        if kind in ("Shape", "Size"):
            return
        varies = not node.input or any(name in self._varying for name in operands(node))
        if not varies:
            inputs = list(node.input)[: 1 if kind == "FakeQuantize" else None]
            leaves = [self._leaves[name] for name in inputs if name in self._leaves]
            for name in filter(None, node.output):
                self._leaves[name] = frozenset().union(*leaves)
            return
        self._varying.update(filter(None, node.output))
        self._visit_layer(node)

    def _visit_layer(self, node: onnx.NodeProto) -> None:
        kind, inputs, result = node.op_type, list(node.input), node.output[0]
        data = inputs[0] if inputs else ""
        if kind in _VIEWS:
            for group in (self._after, self._roots, self._normal):
                if data in group:
                    group.add(result)
        elif (
            kind in ("Sqrt", "ReduceL2")
            or (kind in _PASS_A_ROOT and any(name in self._roots for name in inputs))
            or (kind == "Div" and inputs[1] in self._roots and data not in self._varying)
        ):
            self._roots.add(result)
        elif (
            kind in _NORMALIZATIONS
            or (kind == "Div" and inputs[1] in self._roots)
            or (kind == "Mul" and any(name in self._roots for name in inputs))
        ):
            self._normal.add(result)
        positions = self._positions(node)
        for position in positions:
            if position < len(inputs):
                self._enter(inputs[position], node, result)
                if kind.endswith("Normalization"):
                    self.affine |= self._leaves.get(inputs[position], frozenset())
        if kind in ("Add", "Mul", "Sub", "Sum") and len(inputs) == 2:
            self._visit_affine(node)

    def _visit_affine(self, node: onnx.NodeProto) -> None:
        """Enter the scale and the bias that follow a layer, or are parts of a normalisation."""
        kind, result = node.op_type, node.output[0]
        for data, other in (list(node.input), list(node.input)[::-1]):
            if not self._is_vector(other):
                continue
            if kind == "Mul" and (data in self._normal or data in self._roots):
                self._enter(other, node, result, "the scale of a normalisation, in")
                if data in self._roots:
                    self._roots.add(result)
            elif kind in ("Add", "Sum") and (data in self._after or data in self._normal):
                self._enter(other, node, "", "a bias, in")
            elif kind == "Sub" and data in self._normal and other == node.input[0]:
                self._enter(other, node, "", "the bias of a normalisation, in")

    def _positions(self, node: onnx.NodeProto) -> tuple[int, ...]:
        kind = node.op_type
        if kind == "Einsum":
            return tuple(range(len(node.input)))
        if kind == "Attention":
            return _MICROSOFT_ATTENTION if node.domain == "com.microsoft" else ()
        if kind in _LOOKUPS:
            is_table = any(
                self._ranks.get(leaf, 2) > 1 for leaf in self._leaves.get(node.input[0], ())
            )
            return (0,) if is_table else ()
        return _WEIGHTS.get(kind, ())

    def _is_vector(self, name: str) -> bool:
        """Tell whether a constant has an axis, and is no number in a ``Constant`` node."""
        leaves = self._leaves.get(name, frozenset()) - self._numbers
        return any(self._ranks.get(leaf, 0) > 0 for leaf in leaves)

    def _enter(self, name: str, node: onnx.NodeProto, result: str, use: str | None = None) -> None:
        """Enter the constants of an operand of a layer."""
        leaves = self._leaves.get(name, frozenset())
        if not leaves or not is_float(self._types.get(name)):
            return
        if len(leaves) > 1:  # numbers in an expression of weights are no weights
            leaves = frozenset(leaf for leaf in leaves if self._sizes[leaf] > 1)
        use = use or "a weight of"
        if self._goes_to_sine_and_cosine(node.output[0]):
            self.frequencies |= leaves
        for leaf in leaves:
            self.layers.setdefault(leaf, f"it is {use} the {node.op_type} {label(node)}")
        if leaves and result:
            self._after.add(result)

    def _goes_to_sine_and_cosine(self, name: str) -> bool:
        """Tell whether all uses of a value, apart from its layout and constant factors, are its
        sine and its cosine."""
        kinds, waiting, seen = set(), [name], set()
        while waiting:
            for node in self._users.get(waiting.pop(), ()):
                if node.op_type in _VIEWS or node.op_type in ("Concat", "Mul"):
                    if node.output[0] not in seen:
                        seen.add(node.output[0])
                        waiting.append(node.output[0])
                else:
                    kinds.add(node.op_type)
            if kinds - {"Sin", "Cos"}:
                return False
        return kinds == {"Sin", "Cos"}
