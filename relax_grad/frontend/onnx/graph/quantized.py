"""Quantisation in a graph: pairs with a dequantisation, as quantisation-aware training writes them,
products of integers, as dynamic quantisation does, and weights of integers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import onnx

from ..read.load import Arrays, value_of
from ..read.nodes import STANDARD, attribute, every_graph, label, operands

_PROTO = onnx.TensorProto

#: The smallest and the largest integer of a quantised type.
_RANGES = {
    _PROTO.INT8: (-128, 127),
    _PROTO.UINT8: (0, 255),
    _PROTO.INT16: (-(2**15), 2**15 - 1),
    _PROTO.UINT16: (0, 2**16 - 1),
}

#: The domains of the operators.
_DOMAINS = {*STANDARD, "com.microsoft"}


def join_quantization(model: onnx.ModelProto, arrays: Arrays) -> None:
    """Replace each dequantisation of a number that was quantised with the same scale by one
    operator.

    Its gradient is 1 within the range of the integers and 0 outside (the straight-through
    estimator), while the gradient of a quantisation alone is 0.
    """
    tensors = {
        tensor.name: tensor for graph in every_graph(model.graph) for tensor in graph.initializer
    }
    for graph in every_graph(model.graph):
        made = {node.output[0]: node for node in graph.node if _is(node, "QuantizeLinear")}
        for node in graph.node:
            first = made.get(node.input[0]) if _is(node, "DequantizeLinear") else None
            bounds = None if first is None else _range(first, tensors)
            if first is None or bounds is None or not _fits(first, node, tensors, arrays):
                continue
            joined = onnx.helper.make_node(
                "FakeQuantize",
                [first.input[0], *list(node.input)[1:]],
                [node.output[0]],
                name=node.name,
                domain="relax_grad",
                low=bounds[0],
                high=bounds[1],
                axis=attribute(node, "axis", 1),
            )
            node.CopyFrom(joined)


def join_dynamic_products(model: onnx.ModelProto) -> None:
    """Replace products of integers by products of floats, where dynamic quantisation wrote them.

    ``DynamicQuantizeLinear``, ``MatMulInteger`` or ``ConvInteger``, ``Cast`` and a ``Mul`` by the
    product of both scales compute the product of a rounded operand and a dequantised weight. The
    operand has the gradient of the straight-through estimator, and its scale has none.
    """
    for graph in every_graph(model.graph):
        makers = {name: node for node in graph.node for name in node.output if name}
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        users = defaultdict(list)
        for node in graph.node:
            for name in operands(node):
                users[name].append(node)
        for output in graph.output:
            users[output.name].append(None)
        for node in list(graph.node):
            kind = node.op_type.removesuffix("Integer")
            if node.domain not in STANDARD or kind == node.op_type:
                continue
            product = _dynamic_product(node, makers, users)
            if product is None:
                continue
            source, scale, last = product
            zero = [*node.input, "", ""][3]
            weight, sizes = tensors.get(node.input[1]), []
            for name in filter(None, (scale, zero)):
                dims = tensors[name].dims if name in tensors else [0]
                sizes.append(math.prod(dims) if len(dims) < 2 else 0)
            columns = weight.dims[-1] if weight is not None and kind == "MatMul" else 1
            if weight is None or not {1, columns} >= set(sizes) or len(set(sizes)) > 1:
                continue
            name = last.output[0]
            make = onnx.helper.make_node
            nodes = [
                make(
                    "FakeQuantize",
                    [source.input[0], *source.output[1:]],
                    [f"{name}//data"],
                    name=source.name,
                    domain="relax_grad",
                    low=0,
                    high=255,
                ),
                make(
                    "DequantizeLinear",
                    [weight.name, *filter(None, (scale, zero))],
                    [f"{name}//weight"],
                    **({"axis": len(weight.dims) - 1} if sizes[0] > 1 else {}),
                ),
                make(kind, [f"{name}//data", f"{name}//weight"], [name], name=node.name),
            ]
            nodes[2].attribute.extend(node.attribute)
            at = next(i for i, candidate in enumerate(graph.node) if candidate is last)
            for new in reversed(nodes):
                graph.node.insert(at, new)
            for old in (last, makers[last.input[0]], makers[last.input[1]], node):
                if old is last or all(users[name] == [last] for name in old.output):
                    graph.node.remove(old)


def _dynamic_product(node: onnx.NodeProto, makers: dict, users: Mapping[str, list]) -> tuple | None:
    """Return the quantisation of a product's operand, the name of the weight's scale and the last
    node; None if the nodes are others."""
    source = makers.get(node.input[0])
    if (
        source is None
        or not _is(source, "DynamicQuantizeLinear")
        or list(node.input[:3:2]) != list(source.output[::2])
    ):
        return None
    cast = _only(users[node.output[0]], "Cast")
    if cast is None or attribute(cast, "to") != _PROTO.FLOAT:
        return None
    last = _only(users[cast.output[0]], "Mul")
    if last is None:
        return None
    factor = next((name for name in last.input if name != cast.output[0]), "")
    scales = makers.get(factor)
    if scales is None or not _is(scales, "Mul") or source.output[1] not in scales.input:
        return None
    others = [name for name in scales.input if name != source.output[1]]
    return (source, others[0], last) if others else None


def _only(users: list, kind: str) -> onnx.NodeProto | None:
    """Return the only user of a value, if it is a node of this operator."""
    is_one = len(users) == 1 and users[0] is not None and _is(users[0], kind)
    return users[0] if is_one else None


def integer_weights(model: onnx.ModelProto) -> dict[str, str]:
    """Return the tensors of integers that are dequantised or multiplied, with the label of a node
    that takes them."""
    users = {}
    for graph in every_graph(model.graph):
        tensors = {tensor.name for tensor in graph.initializer if math.prod(tensor.dims) > 1}
        for node in graph.node:
            place = {"DequantizeLinear": 0, "MatMulInteger": 1}.get(node.op_type)
            if place is not None and node.input[place] in tensors:
                users[node.input[place]] = f"{node.op_type} {label(node)}"
    return users


def _is(node: onnx.NodeProto, kind: str) -> bool:
    return node.op_type == kind and node.domain in _DOMAINS


def _range(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> tuple[int, int] | None:
    """Return the range of the integers of a quantisation, or None for other types and for
    blocks."""
    if attribute(node, "block_size", 0):
        return None
    if len(node.input) > 2 and node.input[2]:
        zero = tensors.get(node.input[2])
        return None if zero is None else _RANGES.get(zero.data_type)
    return _RANGES.get(attribute(node, "output_dtype", 0) or _PROTO.UINT8)


def _fits(
    first: onnx.NodeProto,
    second: onnx.NodeProto,
    tensors: Mapping[str, onnx.TensorProto],
    arrays: Arrays,
) -> bool:
    """Tell whether two nodes have the same scale, zero and axis."""
    if attribute(first, "axis", 1) != attribute(second, "axis", 1):
        return False
    own, others = (([*node.input, ""][1:3]) for node in (first, second))
    for first_name, second_name in zip(own, others, strict=True):
        if first_name == second_name:
            continue
        if first_name not in tensors or second_name not in tensors:
            return False
        value, other = (value_of(tensors[name], arrays) for name in (first_name, second_name))
        if value.dtype != other.dtype or not np.array_equal(value, other):
            return False
    return True
