"""The types of the values of a graph, with ONNX Runtime's operators."""

from __future__ import annotations

import onnx

from ..operators.fused import in_domain
from ..read.nodes import opset_of

#: Operators whose first result has the type of the first operand.
_ELEMENTWISE = {
    "BiasAdd",
    "BiasDropout",
    "BiasGelu",
    "BiasSoftmax",
    "FakeQuantize",
    "FastGelu",
    "GatedAdd",
    "GatedRMSNorm",
    "Gelu",
    "GroupNorm",
    "LayerNormalization",
    "QuickGelu",
    "RotaryEmbedding",
    "ScaledSiLU",
    "SimplifiedLayerNormalization",
    "SkipGroupNorm",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
}


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
    types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    return types


def with_known_operators(graph: onnx.GraphProto, opset: int) -> onnx.GraphProto:
    """Return a graph of which ONNX infers the types: ONNX Runtime's operators are replaced by
    others with the same types."""
    known = onnx.GraphProto()
    known.CopyFrom(graph)
    nodes = []
    for node in known.node:
        is_old = node.op_type == "LayerNormalization" and opset < 17
        nodes += _of_same_type(node) if is_old or in_domain(node) else [node]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del known.node[:]
    known.node.extend(copies)
    return known


def _of_same_type(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes whose results have the types of a node's results, or the node."""
    kind, make = node.op_type, onnx.helper.make_node
    attributes = {attr.name: attr for attr in node.attribute}
    if kind in _ELEMENTWISE:
        same = [node.output[0], *list(node.output)[1 if kind == "SkipGroupNorm" else 3 :][:1]]
        return [make("Identity", [node.input[0]], [name]) for name in same if name]
    are_moved = any(
        attributes[name].i for name in ("transBatchA", "transBatchB") if name in attributes
    )
    if kind in ("FusedMatMul", "FusedMatMulActivation") and not are_moved:
        turned = [name in attributes and attributes[name].i for name in ("transA", "transB")]
        if not any(turned):
            return [make("MatMul", node.input[:2], node.output)]
        a, b = "ki" if turned[0] else "ik", "jk" if turned[1] else "kj"
        return [make("Einsum", node.input[:2], node.output, equation=f"...{a},...{b}->...ij")]
    plain = {"FusedGemm": ("Gemm", 3), "FusedConv": ("Conv", 3)}
    if kind in plain:
        name, count = plain[kind]
        unfused = make(name, node.input[:count], node.output)
        unfused.attribute.extend(
            attr for attr in node.attribute if not attr.name.startswith("activation")
        )
        return [unfused]
    return [node]
