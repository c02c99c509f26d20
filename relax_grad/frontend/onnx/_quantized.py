"""Pairs of quantisation and dequantisation, as quantisation-aware training writes them."""

from __future__ import annotations

import numpy as np
import onnx

from ._graph import STANDARD, attribute, every_graph
from ._load import Arrays, value_of

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
    estimator), while that of a quantisation alone is 0.
    """
    tensors = {each.name: each for graph in every_graph(model.graph) for each in graph.initializer}
    for graph in every_graph(model.graph):
        made = {node.output[0]: node for node in graph.node if _is(node, "QuantizeLinear")}
        for node in graph.node:
            first = made.get(node.input[0]) if _is(node, "DequantizeLinear") else None
            bounds = None if first is None else _range(first, tensors)
            if bounds is None or not _fits(first, node, tensors, arrays):
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


def _is(node: onnx.NodeProto, kind: str) -> bool:
    return node.op_type == kind and node.domain in _DOMAINS


def _range(node: onnx.NodeProto, tensors) -> tuple[int, int] | None:
    """Return the range of the integers of a quantisation, or None for other types and for
    blocks."""
    if attribute(node, "block_size", 0):
        return None
    if len(node.input) > 2 and node.input[2]:
        zero = tensors.get(node.input[2])
        return None if zero is None else _RANGES.get(zero.data_type)
    return _RANGES.get(attribute(node, "output_dtype", 0) or _PROTO.UINT8)


def _fits(first: onnx.NodeProto, second: onnx.NodeProto, tensors, arrays: Arrays) -> bool:
    """Tell whether two nodes have the same scale, zero and axis."""
    if attribute(first, "axis", 1) != attribute(second, "axis", 1):
        return False
    own, others = (([*node.input, ""][1:3]) for node in (first, second))
    for one, other in zip(own, others, strict=True):
        if one == other:
            continue
        if one not in tensors or other not in tensors:
            return False
        values = [value_of(tensors[name], arrays) for name in (one, other)]
        if values[0].dtype != values[1].dtype or not np.array_equal(*values):
            return False
    return True
