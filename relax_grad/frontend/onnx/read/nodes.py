"""ONNX graphs before the import: their constants, extents and branches."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from ...._validation import is_integer
from ....ir.module import unused
from .._arguments import DynamicShapes, Shapes

#: The domains of ONNX's own operators.
STANDARD = ("", "ai.onnx")


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators in a model."""
    return next((entry.version for entry in model.opset_import if entry.domain in STANDARD), 1)


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
        own = {tensor.name for tensor in (*inner.initializer, *inner.input)}
        for inner_node in inner.node:
            yield from (name for name in operands(inner_node) if name not in own)
            own.update(inner_node.output)
        yield from (output.name for output in inner.output if output.name not in own)


def attribute(node: onnx.NodeProto, name: str, default: object = None) -> Any:
    """Return the value of an attribute of a node."""
    for attr in node.attribute:
        if attr.name == name:
            return onnx.helper.get_attribute_value(attr)
    return default


def label(node: onnx.NodeProto) -> str:
    """Return the name of a node for messages: without a name, the name of its first result."""
    return node.name or next(filter(None, node.output), "without a name")


def normalize(
    model: onnx.ModelProto,
    shapes: Shapes | None,
    dynamic_shapes: DynamicShapes | None,
    rows: int | str | None = None,
) -> set[str]:
    """Turn ``Constant`` nodes into initializers, and give each axis of an input an extent or a
    symbol.

    Returns the names of the initializers that were ``Constant`` nodes.
    """
    graph = model.graph
    for inner in every_graph(graph):
        if inner.sparse_initializer:
            names = ", ".join(sparse.values.name for sparse in inner.sparse_initializer)
            raise ValueError(
                f"the model has sparse initializers, which cannot be trained: {names}; make them "
                "dense"
            )
    initialized = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initialized]
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]  # the extents may change
    _set_shapes(graph, shapes, dynamic_shapes, rows)
    constants = _constants_to_initializers(graph)
    for inner in every_graph(graph):
        if inner is not graph:
            _constants_to_initializers(inner)
    return constants


def _check_tensor(value: onnx.ValueInfoProto) -> None:
    """Refuse an input that is no tensor of numbers."""
    if not value.type.HasField("tensor_type"):
        raise ValueError(
            f"the input {value.name} is no tensor but a {value.type.WhichOneof('value')}, "
            "which cannot be imported"
        )
    if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
        raise ValueError(
            f"the input {value.name} has strings, which TVM does not have; compute what they give "
            "before the model"
        )


def fix_inputs(graph: onnx.GraphProto, values: Mapping[str, np.typing.ArrayLike]) -> None:
    """Turn inputs into initializers with these values."""
    inputs = {value_info.name: value_info for value_info in graph.input}
    for name, value in values.items():
        if name not in inputs:
            raise ValueError(
                f"constants: the model has no input {name!r}; its inputs are {', '.join(inputs)}"
            )
        _check_tensor(inputs[name])
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
            or any(
                known_size not in (None, size)
                for known_size, size in zip(known, value.shape, strict=True)
            )
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
    constants, kept = set(), []
    for node in graph.node:
        if node.op_type != "Constant" or node.domain not in STANDARD:
            kept.append(node)
            continue
        graph.initializer.append(_constant_tensor(node))
        constants.add(node.output[0])
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)
    return constants


def hoist(graph: onnx.GraphProto) -> None:
    """Move the initializers of branches to the outer graph."""
    taken = {name for node in every_node(graph) for name in node.output}
    taken |= {value.name for value in (*graph.initializer, *graph.input)}
    for inner in every_graph(graph):
        if inner is graph or not inner.initializer:
            continue
        renamed = {}
        for tensor in inner.initializer:
            name = unused(tensor.name, taken)
            taken.add(name)
            if name != tensor.name:
                renamed[tensor.name] = name
        rename(inner, renamed)
        graph.initializer.extend(inner.initializer)
        del inner.initializer[:]


def rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Rename values in a graph and in the graphs within."""
    if not names:
        return
    for inner in every_graph(graph):
        for value in (*inner.initializer, *inner.output):
            value.name = names.get(value.name, value.name)
        for node in inner.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]


def _constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto:
    (attr,) = [
        entry for entry in node.attribute if entry.name.startswith(("value", "sparse_value"))
    ]
    value = onnx.helper.get_attribute_value(attr)
    if attr.name == "value":
        tensor = onnx.TensorProto()
        tensor.CopyFrom(value)
        tensor.name, tensor.doc_string = node.output[0], node.doc_string
        return tensor
    dtypes = {"float": np.float32, "floats": np.float32, "int": np.int64, "ints": np.int64}
    kind = attr.name.removeprefix("value_")
    if kind not in dtypes:
        raise ValueError(
            f"the constant {node.output[0]} is a {kind}, which is no tensor of numbers; TVM "
            "cannot import it"
        )
    tensor = numpy_helper.from_array(np.array(value, dtypes[kind]), node.output[0])
    tensor.doc_string = node.doc_string
    return tensor


def _set_shapes(
    graph: onnx.GraphProto,
    shapes: Shapes | None,
    dynamic_shapes: DynamicShapes | None,
    rows: int | str | None,
) -> None:
    """Give each axis of an input an extent or a symbol, and remove the shapes of the outputs.

    ``rows`` is the extent or the symbol of the first axes, if it is given.
    """
    shapes, dynamic = dict(shapes or {}), dict(dynamic_shapes or {})
    names = [value.name for value in graph.input]
    for argument, options in (("shapes", shapes), ("dynamic_shapes", dynamic)):
        for name in options:
            if name not in names:
                raise ValueError(
                    f"{argument}: the model has no input {name!r}; its inputs are "
                    f"{', '.join(names)}"
                )
    used: dict[str, str] = {}  # the symbols in TVMScript, by the model's symbols
    for value in graph.input:
        _check_tensor(value)
        tensor = value.type.tensor_type
        shape = shapes.get(value.name)
        if not tensor.HasField("shape") and shape is None:
            raise ValueError(
                f"the model does not give the rank of the input {value.name}; give its extents: "
                f"shapes={{{value.name!r}: (...)}}"
            )
        if shape is not None:
            if tensor.HasField("shape") and len(shape) != len(tensor.shape.dim):
                raise ValueError(
                    f"shapes: {value.name} has {len(tensor.shape.dim)} axes, but {tuple(shape)} "
                    f"has {len(shape)}"
                )
            tensor.shape.Clear()
            tensor.shape.SetInParent()
            for extent in shape:
                dim = tensor.shape.dim.add()
                if isinstance(extent, str):
                    dim.dim_param = extent
                else:
                    dim.dim_value = _positive(extent, value.name)
        symbols = dict(dynamic.get(value.name, {}))
        for axis, symbol in symbols.items():
            if not 0 <= axis < len(tensor.shape.dim):
                raise ValueError(
                    f"dynamic_shapes: {value.name} has {len(tensor.shape.dim)} axes, and {axis} "
                    "is none of them"
                )
            tensor.shape.dim[axis].dim_param = symbol
    if rows is not None:
        _set_rows(graph, rows)
    for value in graph.input:
        tensor = value.type.tensor_type
        for axis, dim in enumerate(tensor.shape.dim):
            if dim.WhichOneof("value") == "dim_value" and dim.dim_value > 0:
                continue
            name = dim.dim_param
            if not re.fullmatch(r"\w[\w.]*", name) or name == "?":
                # An unknown extent and an expression each become a new symbol.
                name = f"{value.name}_{axis}"
            dim.dim_param = used.setdefault(name, _identifier(name, used.values()))
    for output in graph.output:
        output.type.tensor_type.ClearField("shape")


def _set_rows(graph: onnx.GraphProto, rows: int | str) -> None:
    """Give the first axes that are equal to the first axis of the first input another extent, or a
    new symbol."""
    shapes = [value.type.tensor_type.shape.dim for value in graph.input]
    firsts = [dims[0] for dims in shapes if len(dims)]
    if not firsts:
        raise ValueError("batch: no input of the model has an axis")
    known = (firsts[0].dim_value, firsts[0].dim_param)
    taken = {dim.dim_param for dims in shapes for dim in dims}
    for dim in [dim for dim in firsts if (dim.dim_value, dim.dim_param) == known]:
        if isinstance(rows, str):
            dim.dim_param = unused(rows, taken)
        else:
            dim.dim_value = rows


def _positive(extent: int, name: str) -> int:
    if not is_integer(extent) or extent < 1:
        raise ValueError(
            f"shapes: the extents of {name} must be positive integers or names, but one is "
            f"{extent!r}"
        )
    return int(extent)


def _identifier(name: str, taken: Collection[str]) -> str:
    """Return a name that is a valid symbol in TVMScript."""
    symbol = re.sub(r"\W", "_", name)
    if not symbol or not (symbol[0].isalpha() or symbol[0] == "_"):
        symbol = f"d_{symbol}"
    while symbol in taken:
        symbol += "_"
    return symbol


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
    needed = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            needed.update(operands(node))
            kept.append(node)
    if len(kept) < len(graph.node):
        kept.reverse()
        del graph.node[:]
        graph.node.extend(kept)
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    if len(initializers) < len(graph.initializer):
        del graph.initializer[:]
        graph.initializer.extend(initializers)
