"""Weights that a file stores twice, such as the table of words and the head of a language model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import onnx

from .._arguments import Copy
from ..read.load import Arrays, value_of
from ..read.nodes import every_node, operands

#: The entry of a node's metadata in which PyTorch's exporter writes the call of the module, with
#: the names of its parameters.
_CALL = "pkg.torch.onnx.fx_node"

#: Tensors with fewer different values, such as zeros or the identity, may be equal by chance.
_LEAST_VALUES = 16

#: The elements of the diagonal by which tensors are compared at first.
_SAMPLES = 16


def tie(model: onnx.ModelProto, arrays: Arrays, tied: bool | Mapping[str, str]) -> list[Copy]:
    """Replace copies of weights by the weights; return the copies.

    If ``tied`` is True, a copy is a tensor that equals another one, which the exporter names as the
    operand of the copy's node. A mapping has the originals by the copies.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    if isinstance(tied, Mapping):
        pairs = dict(tied)
        for name in {*pairs, *pairs.values()} - tensors.keys():
            raise ValueError(f"tied: the model has no constant tensor {name!r}")
    else:
        pairs = _named_by_the_exporter(model, tensors) if tied else {}
    copies = []
    for name, original in pairs.items():
        if original in pairs:
            raise ValueError(f"tied: {original} is an original and a copy too")
        is_transposed = _relation(tensors[name], tensors[original], arrays)
        if is_transposed is not None:
            copies.append(Copy(name, original, is_transposed, tensors[name].doc_string))
        elif isinstance(tied, Mapping):
            raise ValueError(
                f"tied: {name} {tuple(tensors[name].dims)} must have the values of {original} "
                f"{tuple(tensors[original].dims)}, or their transpose, but it has others"
            )
    for i, copy in enumerate(copies):
        kind = "Transpose" if copy.is_transposed else "Identity"
        model.graph.initializer.remove(tensors[copy.name])
        model.graph.node.insert(i, onnx.helper.make_node(kind, [copy.original], [copy.name]))
    return copies


def _named_by_the_exporter(model: onnx.ModelProto, tensors: dict) -> dict[str, str]:
    """Return the originals of tensors by their names, as the metadata of their users have them."""
    mangled = {f"p_{re.sub(r'[^0-9a-zA-Z_]', '_', name)}": name for name in tensors}
    named: dict[str, set[str]] = defaultdict(set)
    for node in every_node(model.graph):
        call = next((entry.value for entry in node.metadata_props if entry.key == _CALL), "")
        known = {mangled[param] for param in re.findall(r"%(p_\w+)", call) if param in mangled}
        for name in operands(node):
            if name in tensors and known:
                named[name] |= known
    originals = {}
    for name, known in named.items():
        same = [
            candidate
            for candidate in known
            if _extents(tensors[candidate]) == _extents(tensors[name])
        ]
        if name not in known and len(same) == 1 and len(tensors[name].dims) > 1:
            originals[name] = same[0]
    return originals


def equal_weights(graph: onnx.GraphProto, names: list[str], arrays: Arrays) -> dict[str, Copy]:
    """Return the weights with the values of an earlier one, by their names; weights of few values
    are left out."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    groups: dict[tuple, list[str]] = defaultdict(list)
    copies = {}
    for name in names:
        if len(tensors[name].dims) < 2:
            continue
        value = value_of(tensors[name], arrays)
        places = np.arange(min(_SAMPLES, *value.shape))
        key = (_extents(tensors[name]), value[(places,) * value.ndim].tobytes())
        for other in groups[key]:
            is_transposed = _relation(tensors[name], tensors[other], arrays)
            if is_transposed is not None and len(np.unique(value)) >= _LEAST_VALUES:
                copies[name] = Copy(name, other, is_transposed, tensors[name].doc_string)
                break
        groups[key].append(name)
    return copies


def _extents(tensor: onnx.TensorProto) -> tuple:
    """Return the type of a tensor and its extents, in order for matrices."""
    dims = list(tensor.dims)
    return tensor.data_type, *(sorted(dims) if len(dims) == 2 else dims)


def _relation(tensor: onnx.TensorProto, other: onnx.TensorProto, arrays: Arrays) -> bool | None:
    """Return whether a tensor is the transpose of another one; None if it is another tensor."""
    if tensor.data_type != other.data_type:
        return None
    value, other_value = value_of(tensor, arrays), value_of(other, arrays)
    if np.array_equal(value, other_value):
        return False
    return True if value.ndim == 2 and np.array_equal(value, other_value.T) else None
