"""ONNX graphs before the import: their constants, extents and branches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from ..._validation import is_integer
from ...ir.module import unused
from ._arguments import DynamicShapes, Shapes
from ._fused import with_known_operators

#: The domains of ONNX's own operators.
STANDARD = ("", "ai.onnx")


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators in a model."""
    return next((each.version for each in model.opset_import if each.domain in STANDARD), 1)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in the attributes of a node: branches and bodies of loops."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def every_node(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of the graphs within."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from every_node(inner)


def operands(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the operands of a node, including the outer values that its subgraphs use."""
    yield from filter(None, node.input)
    for inner in subgraphs(node):
        own = {each.name for each in (*inner.initializer, *inner.input)}
        for each in inner.node:
            yield from (name for name in operands(each) if name not in own)
            own.update(each.output)
        yield from (each.name for each in inner.output if each.name not in own)


def attribute(node: onnx.NodeProto, name: str, default=None):
    """Return the value of an attribute of a node."""
    for each in node.attribute:
        if each.name == name:
            return onnx.helper.get_attribute_value(each)
    return default


def label(node: onnx.NodeProto) -> str:
    """Return the name of a node for messages: without a name, that of its first result."""
    return node.name or next(filter(None, node.output), "without a name")


def normalize(
    model: onnx.ModelProto, shapes: Shapes | None, dynamic_shapes: DynamicShapes | None
) -> set[str]:
    """Turn ``Constant`` nodes into initializers, and give each axis of an input an extent or a
    symbol.

    Returns the names of the initializers that were ``Constant`` nodes.
    """
    graph = model.graph
    for each in every_graph(graph):
        if each.sparse_initializer:
            names = ", ".join(sparse.values.name for sparse in each.sparse_initializer)
            raise ValueError(
                f"the model has sparse initializers, which cannot be trained: {names}; make them "
                "dense"
            )
    given = {each.name for each in graph.initializer}
    inputs = [each for each in graph.input if each.name not in given]
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]  # the extents may change
    _set_shapes(graph, shapes, dynamic_shapes)
    found = _constants_to_initializers(graph)
    for each in every_graph(graph):
        if each is not graph:
            _constants_to_initializers(each)
    return found


def fix_inputs(graph: onnx.GraphProto, values: Mapping[str, np.typing.ArrayLike]) -> None:
    """Turn inputs into initializers with these values."""
    inputs = {each.name: each for each in graph.input}
    for name, value in values.items():
        if name not in inputs:
            raise ValueError(
                f"constants: the model has no input {name!r}; its inputs are {', '.join(inputs)}"
            )
        kind = inputs[name].type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        try:
            value = np.asarray(value, dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"constants: the value of {name} must be numbers of {dtype}, but it is {value!r}"
            ) from error
        known = [dim.dim_value or None for dim in kind.shape.dim]
        if kind.HasField("shape") and (
            len(known) != value.ndim
            or any(each not in (None, size) for each, size in zip(known, value.shape, strict=True))
        ):
            raise ValueError(
                f"constants: the value of {name} has another shape than the input: {value.shape}"
            )
        graph.initializer.append(numpy_helper.from_array(value, name))
        graph.input.remove(inputs[name])


def every_graph(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs within."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from every_graph(inner)


def _constants_to_initializers(graph: onnx.GraphProto) -> set[str]:
    """Turn the ``Constant`` nodes of a graph into initializers; return their names."""
    found, kept = set(), []
    for node in graph.node:
        if node.op_type != "Constant" or node.domain not in STANDARD:
            kept.append(node)
            continue
        graph.initializer.append(_constant_tensor(node))
        found.add(node.output[0])
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)
    return found


def hoist(graph: onnx.GraphProto) -> None:
    """Move the initializers of branches to the outer graph."""
    taken = {name for each in every_node(graph) for name in each.output}
    taken |= {each.name for each in (*graph.initializer, *graph.input)}
    for inner in every_graph(graph):
        if inner is graph or not inner.initializer:
            continue
        renamed = {}
        for each in inner.initializer:
            name = unused(each.name, taken)
            taken.add(name)
            if name != each.name:
                renamed[each.name] = name
        rename(inner, renamed)
        graph.initializer.extend(inner.initializer)
        del inner.initializer[:]


def rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Rename values in a graph and in the graphs within."""
    if not names:
        return
    for each in every_graph(graph):
        for value in (*each.initializer, *each.output):
            value.name = names.get(value.name, value.name)
        for node in each.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]


def _constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto:
    (attr,) = [each for each in node.attribute if each.name.startswith(("value", "sparse_value"))]
    value = onnx.helper.get_attribute_value(attr)
    if attr.name == "value":
        found = onnx.TensorProto()
        found.CopyFrom(value)
        found.name, found.doc_string = node.output[0], node.doc_string
        return found
    dtypes = {"float": np.float32, "floats": np.float32, "int": np.int64, "ints": np.int64}
    kind = attr.name.removeprefix("value_")
    if kind not in dtypes:
        raise ValueError(
            f"the constant {node.output[0]} is a {kind}, which is no tensor of numbers; TVM "
            "cannot import it"
        )
    found = numpy_helper.from_array(np.array(value, dtypes[kind]), node.output[0])
    found.doc_string = node.doc_string
    return found


def _set_shapes(
    graph: onnx.GraphProto, shapes: Shapes | None, dynamic_shapes: DynamicShapes | None
) -> None:
    """Give each axis of an input an extent or a symbol, and remove the shapes of the outputs."""
    shapes, dynamic = dict(shapes or {}), dict(dynamic_shapes or {})
    names = [each.name for each in graph.input]
    for argument, given in (("shapes", shapes), ("dynamic_shapes", dynamic)):
        for name in given:
            if name not in names:
                raise ValueError(
                    f"{argument}: the model has no input {name!r}; its inputs are "
                    f"{', '.join(names)}"
                )
    used: dict[str, str] = {}  # the symbols in TVMScript, by those of the model
    for each in graph.input:
        if not each.type.HasField("tensor_type"):
            raise ValueError(
                f"the input {each.name} is no tensor but a {each.type.WhichOneof('value')}, "
                "which cannot be imported"
            )
        tensor = each.type.tensor_type
        given = shapes.get(each.name)
        if not tensor.HasField("shape") and given is None:
            raise ValueError(
                f"the model does not give the rank of the input {each.name}; give its extents: "
                f"shapes={{{each.name!r}: (...)}}"
            )
        if given is not None:
            if tensor.HasField("shape") and len(given) != len(tensor.shape.dim):
                raise ValueError(
                    f"shapes: {each.name} has {len(tensor.shape.dim)} axes, but {tuple(given)} "
                    f"has {len(given)}"
                )
            tensor.shape.Clear()
            tensor.shape.SetInParent()
            for extent in given:
                dim = tensor.shape.dim.add()
                if isinstance(extent, str):
                    dim.dim_param = extent
                else:
                    dim.dim_value = _positive(extent, each.name)
        symbols = dict(dynamic.get(each.name, {}))
        for axis, symbol in symbols.items():
            if not 0 <= axis < len(tensor.shape.dim):
                raise ValueError(
                    f"dynamic_shapes: {each.name} has {len(tensor.shape.dim)} axes, and {axis} "
                    "is none of them"
                )
            tensor.shape.dim[axis].dim_param = symbol
        for axis, dim in enumerate(tensor.shape.dim):
            if dim.WhichOneof("value") == "dim_value" and dim.dim_value > 0:
                continue
            name = dim.dim_param
            if not re.fullmatch(r"\w[\w.]*", name) or name == "?":
                # An unknown extent and an expression each become a new symbol.
                name = f"{each.name}_{axis}"
            dim.dim_param = used.setdefault(name, _identifier(name, used.values()))
    for each in graph.output:
        each.type.tensor_type.ClearField("shape")


def _positive(extent, name: str) -> int:
    if not is_integer(extent) or extent < 1:
        raise ValueError(
            f"shapes: the extents of {name} must be positive integers or names, but one is "
            f"{extent!r}"
        )
    return int(extent)


def _identifier(name: str, taken) -> str:
    """Return a name that is a valid symbol in TVMScript."""
    found = re.sub(r"\W", "_", name)
    if not found or not (found[0].isalpha() or found[0] == "_"):
        found = f"d_{found}"
    while found in taken:
        found += "_"
    return found


def types_of(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Return the types of the values of the outer graph, as far as ONNX infers them."""
    known = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    known.graph.CopyFrom(with_known_operators(model.graph, opset_of(model)))
    try:
        inferred = onnx.shape_inference.infer_shapes(known, data_prop=True)
    except Exception as error:  # the module raises several kinds
        raise ValueError(
            f"ONNX cannot infer the types of the model, which is not valid: {error}"
        ) from error
    graph = inferred.graph
    found = {each.name: each.type for each in (*graph.input, *graph.value_info, *graph.output)}
    for each in graph.initializer:
        found[each.name] = onnx.helper.make_tensor_type_proto(each.data_type, each.dims)
    return found


def extents(kind: onnx.TypeProto | None) -> list[int | str | None] | None:
    """Return the extents of a type: integers, symbols, or None for an unknown extent; None for an
    unknown rank."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.WhichOneof("value") == "dim_value" else (dim.dim_param or None)
        for dim in kind.tensor_type.shape.dim
    ]


def is_float(kind: onnx.TypeProto | None) -> bool:
    """Tell whether a value may hold floating-point numbers; an unknown type may."""
    if kind is None or not kind.HasField("tensor_type"):
        return True
    return is_float_type(kind.tensor_type.elem_type)


def is_float_type(elem_type: int) -> bool:
    """Tell whether an element type is a floating-point type, or undefined."""
    proto = onnx.TensorProto
    return elem_type in (proto.UNDEFINED, proto.FLOAT, proto.DOUBLE, proto.FLOAT16, proto.BFLOAT16)


def without_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes and initializers whose values are not used."""
    needed = {each.name for each in graph.output}
    kept = []
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            needed.update(operands(node))
            kept.append(node)
    if len(kept) < len(graph.node):
        kept.reverse()
        del graph.node[:]
        graph.node.extend(kept)
    initializers = [each for each in graph.initializer if each.name in needed]
    if len(initializers) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(initializers)
