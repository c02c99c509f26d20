"""Constant folding of ONNX graphs: extents, shapes and branches that depend only on the types of
the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from ....ir.module import unused
from ..read.load import Arrays, value_of
from ..read.nodes import (
    STANDARD,
    attribute,
    extents,
    is_float,
    is_float_type,
    label,
    opset_of,
    rename,
    subgraphs,
    without_unused,
)
from .types import types_of
from .unroll import unrolled_loop, unrolled_scan
from .weights import roles_of

#: Results of more elements are computed at run time.
_MOST_ELEMENTS = 1 << 22

#: The most elements of a vector of integers that may be a shape.
_MOST_EXTENTS = 64

#: Operators with random results.
_RANDOM = {
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}

#: The position of the shape operand of operators. Symbols in it are replaced by extents of inputs.
_TAKES_SHAPE = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}


def fold(
    model: onnx.ModelProto,
    constants: Collection[str],
    arrays: Arrays,
    fixed: Collection[str] = (),
    is_wanted: Callable[[str], bool] = lambda name: False,
) -> set[str]:
    """Fold the values that depend only on the types of the inputs, and conditionals with a known
    condition.

    Nodes with a weight among their operands are not folded, and weights keep their names.

    Parameters
    ----------
    model : onnx.ModelProto
        The model, which is changed.
    constants : Collection[str]
        The initializers that were ``Constant`` nodes.
    arrays : Arrays
        The values of large tensors.
    fixed : Collection[str]
        The initializers that were inputs.
    is_wanted : Callable
        Tells whether a constant that is no weight by default is not folded, because it may be
        trained on request.

    Returns
    -------
    folded : set[str]
        The initializers that replace folded values, and the fixed inputs.
    """
    folded: set[str] = set(fixed)
    while True:
        without_unused(model.graph)
        types = types_of(model)
        roles = roles_of(model, types, constants, folded, arrays)
        kept = {*roles.weights, *roles.frozen, *roles.statistics}
        folding = _Folding(model, types, kept | set(filter(is_wanted, roles.optional)), arrays)
        changed = folding.run()
        folded |= folding.folded
        if not changed:
            return folded


class _Folding:
    """One pass over the nodes of a graph."""

    def __init__(self, model: onnx.ModelProto, types: dict, weights: set, arrays: Arrays):
        self.model, self.graph, self.types = model, model.graph, types
        self.opset = opset_of(model)
        self.folded: set[str] = set()
        self.new: dict[str, np.ndarray] = {}
        self.known: dict[str, np.ndarray] = {
            tensor.name: value_of(tensor, arrays)
            for tensor in self.graph.initializer
            if tensor.name not in weights and tensor.data_type != onnx.TensorProto.STRING
        }
        #: Arrays of objects: integers, symbols, and None for an unknown element.
        self.partly: dict[str, np.ndarray] = {}
        self.symbols: dict[str, tuple[str, int]] = {}
        for value in self.graph.input:
            for axis, extent in enumerate(extents(value.type) or []):
                if isinstance(extent, str):
                    self.symbols.setdefault(extent, (value.name, axis))
        self.names = {name for node in self.graph.node for name in node.output}
        self.names |= {value.name for value in (*self.graph.initializer, *self.graph.input)}
        self.changed = False

    def run(self) -> bool:
        """Fold, and tell whether anything changed."""
        nodes = []
        for node in self.graph.node:
            nodes += self._folded(node)
        if self.changed:
            del self.graph.node[:]
            self.graph.node.extend(nodes)
        for name, value in self.new.items():
            self.graph.initializer.append(numpy_helper.from_array(value, name))
            self.folded.add(name)
        return self.changed

    def _folded(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that replace a node: none if its results are constants."""
        if node.domain not in STANDARD:
            return [node]
        if node.op_type == "If" and node.input[0] in self.known:
            self.changed = True
            return self._branch(node)
        if node.op_type in ("Loop", "Scan"):
            return self._trips(node)
        values = self._values(node)
        if values is not None:
            self.changed = True
            for name, value in zip(node.output, values, strict=False):
                if value is not None:
                    self.known[name] = self.new[name] = value
            return []
        partly = _partly(node, self)
        if partly is not None:
            self.partly[node.output[0]] = partly
            if all(map(_is_integer, partly.flat)):
                kind = self.types.get(node.output[0])
                dtype = np.int64
                if kind is not None and kind.tensor_type.elem_type:
                    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
                self.known[node.output[0]] = self.new[node.output[0]] = partly.astype(dtype)
                self.changed = True
                return []
        if node.op_type in _TAKES_SHAPE:
            return self._with_shape(node, _TAKES_SHAPE[node.op_type])
        return [node]

    def _values(self, node: onnx.NodeProto) -> list[np.ndarray | None] | None:
        """Return the results of a node on constants, or None."""
        if (
            not node.input
            or node.op_type in _RANDOM
            or not all(name in self.known for name in node.input if name)
            or any(True for _ in subgraphs(node))
        ):
            return None
        arguments = {name: self.known[name] for name in node.input if name}
        for name in node.output:
            shape = extents(self.types.get(name)) or []
            if _is_known(shape) and math.prod(shape) > _MOST_ELEMENTS:
                return None
        imports = [onnx.helper.make_opsetid("", self.opset)]
        empty = onnx.TypeProto()
        graph = onnx.helper.make_graph(
            [node],
            "folded",
            [onnx.helper.make_value_info(name, empty) for name in arguments],
            [onnx.helper.make_value_info(name, empty) for name in node.output if name],
        )
        try:
            single = onnx.helper.make_model(graph, opset_imports=imports)
            arrays = ReferenceEvaluator(single).run(None, arguments)
        except Exception:  # an operator that the evaluator does not have stays in the graph
            return None
        arrays = [np.asarray(array) for array in arrays]
        if any(array.dtype == object or array.size > _MOST_ELEMENTS for array in arrays):
            return None
        results = iter(arrays)
        return [next(results) if name else None for name in node.output]

    def elements(self, name: str) -> np.ndarray | None:
        """Return the elements of an integer operand as objects, or None."""
        if name in self.known and not is_float_type(
            onnx.helper.np_dtype_to_tensor_dtype(self.known[name].dtype)
        ):
            return self.known[name].astype(object)
        if name not in self.partly:
            kind = self.types.get(name)
            shape = extents(kind)
            if shape is None or is_float(kind) or len(shape) > 1:
                return None
            if not _is_known(shape) or math.prod(shape) > _MOST_EXTENTS:
                return None
            self.partly[name] = np.full(shape, None, object)
        return self.partly[name]

    def _with_shape(self, node: onnx.NodeProto, position: int) -> list[onnx.NodeProto]:
        """Return a node whose shape operand is a constant or is computed from the extents of the
        graph's inputs.

        The node is returned as it is if an extent is unknown.
        """
        name = node.input[position]
        elements = None if name in self.known else self.partly.get(name)
        if elements is None or elements.ndim != 1:
            return [node]
        shape = elements.tolist()
        if node.op_type == "Reshape" and not attribute(node, "allowzero", 0):
            data = extents(self.types.get(node.input[0])) or []
            constant = [
                0
                if isinstance(extent, str) and axis < len(data) and data[axis] == extent
                else (extent if _is_integer(extent) else -1)
                for axis, extent in enumerate(shape)
            ]
            if constant.count(-1) <= 1:
                return [self._with_operand(node, position, self._constant(node, constant))]
        if all(_is_integer(extent) or extent in self.symbols for extent in shape):
            return self._from_inputs(node, position, shape)
        return [node]

    def _from_inputs(
        self, node: onnx.NodeProto, position: int, shape: list[int | str | None]
    ) -> list[onnx.NodeProto]:
        """Return a node, after the nodes that compute its shape operand from the shapes of the
        graph's inputs."""
        made, parts = [], []
        stem = f"{node.output[0]}//shape"  # no exporter writes such a name
        name = f"{stem}_all"
        if node.input[position] == name:
            return [node]
        for number, extent in enumerate(shape):
            if isinstance(extent, str):
                source, axis = self.symbols[extent]
                part = f"{stem}_{number}"
                whole, bounds = f"{part}_of", [f"{part}_from", f"{part}_to", f"{part}_axis"]
                for bound, value in zip(bounds, (axis, axis + 1, 0), strict=True):
                    self.new[bound] = np.array([value], np.int64)
                made.append(onnx.helper.make_node("Shape", [source], [whole]))
                made.append(onnx.helper.make_node("Slice", [whole, *bounds], [part]))
            else:
                part = f"{stem}_{number}"
                self.new[part] = np.array([extent], np.int64)
            parts.append(part)
        made.append(onnx.helper.make_node("Concat", parts, [name], axis=0))
        self.changed = True
        return [*made, self._with_operand(node, position, name)]

    def _constant(self, node: onnx.NodeProto, values: list[int]) -> str:
        name = f"{node.output[0]}//shape"
        self.new[name] = np.array(values, np.int64)
        self.changed = True
        return name

    def _with_operand(self, node: onnx.NodeProto, position: int, name: str) -> onnx.NodeProto:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[position] = name
        return copy

    def _trips(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the trips of a loop; the loop, if their number is not known."""
        if node.op_type == "Loop":
            trips = unrolled_loop(node, self.known, self.names, self.opset)
        else:
            shapes = self.types.get
            trips = unrolled_scan(node, lambda name: extents(shapes(name)), self.names, self.opset)
        if trips is None:
            return [node]
        self.changed = True
        self.graph.initializer.extend(trips.weights)
        self.new.update(trips.constants)
        return trips.nodes

    def _branch(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes of the branch that a constant condition selects."""
        taken = bool(self.known[node.input[0]].item())
        branch = onnx.GraphProto()
        branch.CopyFrom(attribute(node, "then_branch" if taken else "else_branch"))
        own = {tensor.name for tensor in branch.initializer}
        own |= {name for inner_node in branch.node for name in inner_node.output if name}
        renamed = {name: unused(f"{label(node)}_{name}", self.names) for name in own & self.names}
        self.names |= {renamed.get(name, name) for name in own}
        rename(branch, renamed)
        nodes = list(branch.node)
        self.graph.initializer.extend(branch.initializer)
        for inner, outer in zip(branch.output, node.output, strict=True):
            if outer:
                nodes.append(onnx.helper.make_node("Identity", [inner.name], [outer]))
        return nodes


def _is_known(shape: list[int | str | None]) -> TypeGuard[list[int]]:
    return all(isinstance(extent, int) for extent in shape)


def _partly(node: onnx.NodeProto, folding: _Folding) -> np.ndarray | None:
    """Return the elements of a result that are known or are symbols, or None for any other
    result."""
    kind = node.op_type
    if kind == "Shape":
        shape = extents(folding.types.get(node.input[0]))
        if shape is None:
            return None
        start, end = attribute(node, "start", 0), attribute(node, "end")
        return _objects(shape[slice(start, end)])
    if kind not in _ON_ELEMENTS:
        return None
    arguments = [folding.elements(name) if name else None for name in node.input]
    # None among the arguments of a function stands for an operand that the node lacks.
    if any(name and argument is None for name, argument in zip(node.input, arguments, strict=True)):
        return None
    try:
        return _ON_ELEMENTS[kind](node, *arguments)
    except (TypeError, ValueError, IndexError):  # an unknown element, or an invalid node
        return None


def _objects(values: Sequence[int | str | None]) -> np.ndarray:
    array: np.ndarray = np.empty(len(values), object)
    array[:] = values
    return array


def _integers(values: Any) -> list[int]:
    """Return the elements of an operand, or raise TypeError if one is unknown."""
    if not all(map(_is_integer, values.flat)):
        raise TypeError("an element is unknown")
    return [int(element) for element in values.flat]


def _is_integer(element: object) -> bool:
    """Tell whether an element is known: not a symbol, and not None."""
    return isinstance(element, (int, np.integer))


def _cast(node: onnx.NodeProto, data: np.ndarray) -> np.ndarray | None:
    to = attribute(node, "to")
    return None if is_float_type(to) or to == onnx.TensorProto.BOOL else data


def _gather(node: onnx.NodeProto, data: np.ndarray, indices: np.ndarray) -> np.ndarray:
    taken = np.take(
        data, np.array(_integers(indices)).reshape(indices.shape), attribute(node, "axis", 0)
    )
    return taken if isinstance(taken, np.ndarray) else _scalar(taken)


def _scalar(value: object) -> np.ndarray:
    array: np.ndarray = np.empty((), object)
    array[()] = value
    return array


def _slice(node: onnx.NodeProto, data: np.ndarray, *bounds: Any) -> np.ndarray:
    if bounds:
        starts, ends, *rest = bounds
        axes, steps = [*rest, None, None][:2]
        axes = [0] if axes is None else _integers(axes)
        steps = [1] if steps is None else _integers(steps)
        starts, ends = _integers(starts), _integers(ends)
    else:
        starts, ends = attribute(node, "starts"), attribute(node, "ends")
        axes, steps = attribute(node, "axes", [0]), [1]
    if data.ndim != 1 or list(axes) not in ([0], [-1]):
        raise ValueError("not a slice of a shape")
    return data[slice(starts[0], ends[0], steps[0])]


def _concat(node: onnx.NodeProto, *parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts, axis=attribute(node, "axis", 0))


def _unsqueeze(node: onnx.NodeProto, data: np.ndarray, axes: Any = None) -> np.ndarray:
    axes = attribute(node, "axes") if axes is None else _integers(axes)
    return np.expand_dims(data, tuple(axes))


def _squeeze(node: onnx.NodeProto, data: np.ndarray, axes: Any = None) -> np.ndarray:
    axes = attribute(node, "axes") if axes is None else _integers(axes)
    squeezed = np.squeeze(data, None if axes is None else tuple(axes))
    return squeezed if isinstance(squeezed, np.ndarray) else _scalar(squeezed)


def _reshape(node: onnx.NodeProto, data: np.ndarray, shape: np.ndarray) -> np.ndarray:
    return data.reshape(_integers(shape))


def _arithmetic(function: Callable) -> Callable:
    """Return the element-wise function of an operator; it returns None for each element that is not
    an integer."""

    def apply(node: onnx.NodeProto, a: Any, b: Any) -> np.ndarray:
        a, b = np.broadcast_arrays(a, b)
        values = [
            function(int(x), int(y)) if _is_integer(x) and _is_integer(y) else None
            for x, y in zip(a.flat, b.flat, strict=True)
        ]
        return _objects(values).reshape(a.shape)

    return apply


def _truncated(x: int, y: int) -> int:
    """Return the quotient, rounded towards zero as ONNX does."""
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


#: The functions of operators on arrays of integers, symbols and None.
_ON_ELEMENTS: dict[str, Callable] = {
    "Add": _arithmetic(lambda x, y: x + y),
    "Cast": _cast,
    "Concat": _concat,
    "Div": _arithmetic(lambda x, y: _truncated(x, y) if y else None),
    "Gather": _gather,
    "Identity": lambda node, data: data,
    "Mul": _arithmetic(lambda x, y: x * y),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _arithmetic(lambda x, y: x - y),
    "Unsqueeze": _unsqueeze,
}
