"""Operators that ONNX defines by other operators, for those without a converter."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.inliner

from ..read.nodes import STANDARD, every_node

#: Operators that are computed before the import, with constant operands; their definitions are not
#: used.
_FOLDED = {"BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"}


def expand(model: onnx.ModelProto, is_known: Callable[[onnx.NodeProto], bool]) -> onnx.ModelProto:
    """Return a model in which nodes of ONNX's own operators without a converter are written by
    operators with one.

    A node whose definition needs an operator without a converter is left as it is, so that errors
    name it.

    Parameters
    ----------
    model : onnx.ModelProto
        The model.
    is_known : Callable
        Tells whether a node has a converter.
    """

    def unknown(candidate: onnx.ModelProto) -> set[str]:
        nodes = (node for node in every_node(candidate.graph) if node.domain in STANDARD)
        return {node.op_type for node in nodes if not is_known(node)}

    for kind in sorted(unknown(model) - _FOLDED):
        others, new = unknown(model) - {kind}, {kind}
        expanded: onnx.ModelProto | None = model
        while expanded is not None and new:
            expanded = _inlined(expanded, min(new))
            new = set() if expanded is None else unknown(expanded) - others
        model = model if expanded is None else expanded
    return model


def _inlined(model: onnx.ModelProto, kind: str) -> onnx.ModelProto | None:
    """Return a model with the definition of an operator instead of its nodes; None if there is
    none."""
    try:
        # Some definitions depend on the types of the operands, also of initializers.
        typed = onnx.shape_inference.infer_shapes(model, data_prop=True)
        typed.graph.value_info.extend(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            for tensor in typed.graph.initializer
        )
        inlined = onnx.inliner.inline_selected_functions(
            typed, [("", kind)], inline_schema_functions=True
        )
    except Exception:  # an older package, an unknown type, an invalid model: of several kinds
        return None
    return None if any(node.op_type == kind for node in every_node(inlined.graph)) else inlined
