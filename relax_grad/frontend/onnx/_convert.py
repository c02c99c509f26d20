"""The steps from an ONNX model to a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import tvm

from ._arguments import Copy, DynamicShapes, Shapes
from ._importer import check_operators, has_converter, imported
from .graph.expand import expand
from .graph.fold import fold
from .graph.inference import computes_in_training, set_inference
from .graph.quantized import integer_weights, join_dynamic_products, join_quantization
from .graph.tied import equal_weights, tie
from .graph.types import types_of
from .graph.weights import Roles, is_training, roles_of
from .read.load import Arrays, load, put_back, value_of
from .read.nodes import (
    attribute,
    every_graph,
    every_node,
    fix_inputs,
    hoist,
    normalize,
    operands,
    opset_of,
)


@dataclass
class Prepared:
    """A folded model with the roles of its constants.

    Attributes
    ----------
    model : onnx.ModelProto
        The model.
    roles : Roles
        The roles of its initializers.
    outputs : list[str]
        The names of the outputs.
    arrays : Arrays
        The values of large tensors.
    copies : list[Copy]
        The copies of weights, which are no initializers any more.
    """

    model: onnx.ModelProto
    roles: Roles
    outputs: list[str]
    arrays: Arrays
    copies: list[Copy]

    @property
    def places(self) -> dict[str, str]:
        """The places of the initializers in the file, by their names."""
        return {tensor.name: tensor.doc_string for tensor in self.model.graph.initializer}

    def in_inference(self) -> Prepared | None:
        """Return a copy whose normalisations and dropout are in inference; None if all are
        already."""
        if not computes_in_training(self.model):
            return None
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        set_inference(model)
        return Prepared(model, self.roles, self.outputs, self.arrays, self.copies)

    def lift(
        self, names: Sequence[str], states: Mapping[str, str], kinds: dict | None = None
    ) -> None:
        """Turn initializers into inputs of the graph, in this order, and states into outputs.

        ``kinds`` has the element types and extents of the initializers, if the graph may lack some
        of them.
        """
        graph = self.model.graph
        if kinds is None:
            kinds = {
                tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in graph.initializer
            }
        for values, group in ((graph.input, names), (graph.output, states)):
            for name in group:
                label = states[name] if values is graph.output else name
                values.append(onnx.helper.make_tensor_value_info(label, *kinds[name]))
        kept = [tensor for tensor in graph.initializer if tensor.name not in set(names)]
        del graph.initializer[:]
        graph.initializer.extend(kept)

    def values_of(self, names: Sequence[str]) -> dict[str, tvm.runtime.Tensor]:
        """Return the values of initializers."""
        tensors = {tensor.name: tensor for tensor in self.model.graph.initializer}
        return {name: tvm.runtime.tensor(value_of(tensors[name], self.arrays)) for name in names}

    def imported(
        self, simplify: bool | str, onnxsim_is_installed: bool
    ) -> tuple[tvm.IRModule, bool]:
        """Return the module of the model, after onnxsim if that is asked for or needed, and whether
        it draws."""
        put_back(self.model.graph, self.arrays)
        if simplify is True:
            self._simplify()
        check_operators(self.model)
        try:
            return imported(self.model)
        except ValueError as error:
            if simplify != "auto" or not onnxsim_is_installed:
                raise
            try:
                self._simplify()
            except ValueError:
                raise error from None  # the error of the original model
        return imported(self.model)

    def _simplify(self) -> None:
        import onnxsim

        model = onnx.shape_inference.infer_shapes(self.model, data_prop=True)
        try:
            simplified, _ = onnxsim.simplify(model)
        except Exception as error:  # the package raises several kinds
            raise ValueError(f"onnxsim cannot simplify the model: {error}") from error
        for values, expected in (
            (simplified.graph.input, self.model.graph.input),
            (simplified.graph.output, self.model.graph.output),
        ):
            if [value.name for value in values] != [value.name for value in expected]:
                raise ValueError(
                    "onnxsim changes the inputs or outputs of the model; simplify=False"
                )
        normalize(simplified, None, None)
        _name_nodes(simplified)
        _trim_results(simplified)
        self.model = simplified


def prepare(
    model: onnx.ModelProto,
    shapes: Shapes | None,
    dynamic_shapes: DynamicShapes | None,
    fixed: Mapping | None,
    dropout: bool,
    tied: bool | Mapping[str, str],
    is_wanted: Callable[[str], bool],
    rows: int | str | None = None,
) -> Prepared:
    """Return a model whose shapes are folded as far as the types of its inputs decide them.

    ``is_wanted`` is that of :func:`fold`, and ``rows`` the extent or the symbol of the first axes
    of the inputs, instead of that in the model.
    """
    model, arrays = load(model)
    model = expand(model, has_converter)
    fix_inputs(model.graph, fixed or {})
    constants = normalize(model, shapes, dynamic_shapes, rows)
    join_quantization(model, arrays)
    join_dynamic_products(model)
    _name_nodes(model)
    integers = integer_weights(model)
    copies = tie(model, arrays, tied)
    if not dropout:
        set_inference(model, normalisation=False)
    first = roles_of(model, types_of(model), constants, set(fixed or ()), arrays)
    folded = fold(model, constants, arrays, fixed or (), is_wanted)
    hoist(model.graph)
    roles = roles_of(model, types_of(model), constants, folded, arrays)
    roles = roles._replace(
        choices={**first.choices, **roles.choices},
        cut={**first.cut, **roles.cut},
        integers=integers,
        copies={copy.name: copy for copy in copies},
        equal=equal_weights(model.graph, roles.weights, arrays),
    )
    outputs = [output.name for output in model.graph.output]
    _mark_training(model)
    _trim_results(model, roles.states.values())
    return Prepared(model, roles, outputs, arrays, copies)


def _name_nodes(model: onnx.ModelProto) -> None:
    """Give every node a name, for messages."""
    for node in every_node(model.graph):
        node.name = node.name or next(filter(None, node.output), node.op_type)


def _mark_training(model: onnx.ModelProto) -> None:
    """Set the attribute of normalisations in training mode, which older versions mark by the number
    of results."""
    opset = opset_of(model)
    for node in every_node(model.graph):
        if node.op_type != "BatchNormalization" or opset >= 14:
            continue
        if is_training(node, opset) and attribute(node, "training_mode") is None:
            node.attribute.append(onnx.helper.make_attribute("training_mode", 1))


def _trim_results(model: onnx.ModelProto, kept: Iterable[str] = ()) -> None:
    """Remove the unused last results of nodes."""
    uses = Counter(kept)
    for graph in every_graph(model.graph):
        uses.update(output.name for output in graph.output)
        for node in graph.node:
            uses.update(operands(node))
    for node in every_node(model.graph):
        while len(node.output) > 1 and not uses[node.output[-1]]:
            node.output.pop()
