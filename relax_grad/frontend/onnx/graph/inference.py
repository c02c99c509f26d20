"""Normalisation and dropout in inference."""

from __future__ import annotations

from collections import Counter

import onnx
from onnx import numpy_helper

from ..read.nodes import attribute, every_graph, every_node, operands, opset_of
from .weights import is_training

#: The operand that tells whether a node drops elements.
_TRAINING_MODE = {"Dropout": 2, "BiasDropout": 4}


def computes_in_training(model: onnx.ModelProto) -> bool:
    """Tell whether a node drops elements, or normalises by the statistics of a batch."""
    opset = opset_of(model)
    tensors = {
        tensor.name: tensor for graph in every_graph(model.graph) for tensor in graph.initializer
    }
    for node in every_node(model.graph):
        if node.op_type == "BatchNormalization" and is_training(node, opset):
            return True
        place = _TRAINING_MODE.get(node.op_type, len(node.input))
        if opset >= 12 and len(node.input) > place and node.input[place]:
            mode = tensors.get(node.input[place])
            if mode is None or numpy_helper.to_array(mode).any():
                return True
    return False


def set_inference(model: onnx.ModelProto, normalisation: bool = True) -> None:
    """Set dropout to inference, and normalisations of batches, unless ``normalisation`` is False.

    The new statistics of a normalisation, where they are used, are the old ones.
    """
    opset = opset_of(model)
    unused: set[str] = set()
    for graph in every_graph(model.graph):
        used = Counter(output.name for output in graph.output)
        for node in graph.node:
            used.update(operands(node))
        nodes = []
        for node in graph.node:
            nodes.append(node)
            if node.op_type in _TRAINING_MODE:
                place = _TRAINING_MODE[node.op_type]
                if opset >= 12:
                    unused.update(node.input[place:])
                    del node.input[place:]
                elif opset < 7:
                    _set(node, "is_test", 1)
            elif (
                node.op_type == "BatchNormalization" and normalisation and is_training(node, opset)
            ):
                if opset < 7:
                    _set(node, "is_test", 1)
                for position in (3, 4):
                    name = node.output[position - 2] if len(node.output) > position - 2 else ""
                    if used[name]:
                        nodes.append(
                            onnx.helper.make_node("Identity", [node.input[position]], [name])
                        )
                del node.output[1:]
                if attribute(node, "training_mode") is not None:
                    _set(node, "training_mode", 0)
        if len(nodes) > len(graph.node):
            copies = [onnx.NodeProto() for _ in nodes]
            for copy, node in zip(copies, nodes, strict=True):
                copy.CopyFrom(node)
            del graph.node[:]
            graph.node.extend(copies)
    _remove(model, unused)


def _remove(model: onnx.ModelProto, names: set[str]) -> None:
    """Remove the constants of these names that no node uses."""
    for graph in every_graph(model.graph):
        names = names - {output.name for output in graph.output}
        names = names.difference(*map(operands, graph.node))
    for graph in every_graph(model.graph):
        for tensor in [tensor for tensor in graph.initializer if tensor.name in names]:
            graph.initializer.remove(tensor)
            for value in [value for value in graph.input if value.name == tensor.name]:
                graph.input.remove(value)
        for node in [node for node in graph.node if node.op_type == "Constant"]:
            if node.output[0] in names:
                graph.node.remove(node)


def _set(node: onnx.NodeProto, name: str, value: int) -> None:
    kept = [attr for attr in node.attribute if attr.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
