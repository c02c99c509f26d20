"""The nodes whose results are computed before the run from symbolic extents."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import onnx

from ..read.nodes import STANDARD, attribute
from .values import (
    LARGEST_DENOMINATOR,
    Element,
    Extents,
    Known,
    Ratio,
    Unknown,
    is_symbolic,
    objects,
    plain,
)

#: Larger tensors are computed at run time.
MOST_ELEMENTS = 256


def evaluated(
    node: onnx.NodeProto, operands: list[Known | None], shapes: list, extents: Extents
) -> list[Known] | None:
    """Return the results of a node, or None if they are not known before the run.

    Parameters
    ----------
    node : onnx.NodeProto
        The node.
    operands : list[Known or None]
        The operands, as far as they are known.
    shapes : list
        The shapes of the operands, as far as they are known.
    extents : Extents
        The arithmetic of extents.
    """
    kind = node.op_type
    if node.domain not in STANDARD:
        return None
    if kind in ("Shape", "Size"):
        if shapes[0] is None:
            return None
        if kind == "Size":
            return [Known(objects([extents.product(shapes[0])], ()), "int64")]
        start, end = attribute(node, "start", 0), attribute(node, "end")
        return [Known(objects(map(plain, shapes[0]))[slice(start, end)], "int64")]
    if kind == "CastLike" and operands[1] is not None:
        to = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(operands[1].dtype))
        kind, operands = "Cast", operands[:1]
        node = onnx.helper.make_node(kind, node.input[:1], node.output, to=to)
    function = _FUNCTIONS.get(kind)
    inputs = [operand for name, operand in zip(node.input, operands, strict=True) if name]
    known = [operand for operand in inputs if operand is not None]
    if kind in _DECIDED_BY:
        decided = _decided(_DECIDED_BY[kind], operands, shapes)
        if decided is not None:
            return [decided]
    if function is None or len(known) < len(inputs):
        return None
    if not any(operand.is_symbolic or operand.dtype == "bool" for operand in known):
        return None
    try:
        arrays = [None if operand is None else operand.elements for operand in operands]
        dtype = known[0].dtype
        result = function(extents, node, *arrays)
    except (Unknown, IndexError, TypeError, ValueError):  # the converter names an invalid node
        return None
    if kind in _RELATIONS or kind in _LOGIC:
        dtype = "bool"
    elif kind == "Where":
        dtype = known[1].dtype
    elif kind == "Cast":
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(attribute(node, "to")))
    results = result if isinstance(result, list) else [result]
    if any(elements.size > MOST_ELEMENTS for elements in results):
        return None
    return [Known(elements, dtype) for elements in results]


def _decided(value: bool, operands: list[Known | None], shapes: list) -> Known | None:
    """Return the result of ``And`` or ``Or`` if an operand decides it, whatever the other one
    is."""
    if not any(
        operand is not None and all(x is value for x in operand.elements.ravel().tolist())
        for operand in operands
    ):
        return None
    if any(shape is None or any(map(is_symbolic, map(plain, shape))) for shape in shapes):
        return None
    shape = np.broadcast_shapes(*(tuple(map(int, extents)) for extents in shapes))
    count = math.prod(shape)
    return Known(objects([value] * count, shape), "bool") if count <= MOST_ELEMENTS else None


def known_constant(value: np.ndarray) -> Known | None:
    """Return a constant as a tensor of known elements; None if it has other numbers than integers
    and short fractions."""
    if value.size > MOST_ELEMENTS or value.dtype.kind not in "iubf":
        return None
    if value.dtype.kind != "f":
        return Known(objects(value.ravel().tolist(), value.shape), str(value.dtype))
    ratios = []
    for number in value.ravel().tolist():
        if not math.isfinite(number):
            return None
        fraction = Fraction(number)
        if fraction.denominator > LARGEST_DENOMINATOR:
            return None
        ratios.append(Ratio(fraction.numerator, fraction.denominator))
    return Known(objects(ratios, value.shape), str(value.dtype))


def _elementwise(name: str) -> Callable:
    def apply(extents: Extents, node: onnx.NodeProto, *operands: np.ndarray) -> np.ndarray:
        function = getattr(extents, name)
        arrays = np.broadcast_arrays(*operands)
        result = arrays[0]
        for other in arrays[1:]:
            result = _mapped(function, result, other)
        return result

    return apply


def _relation(kind: str) -> Callable:
    def apply(extents: Extents, node: onnx.NodeProto, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _mapped(extents.compare(kind), *np.broadcast_arrays(a, b))

    return apply


def _mapped(function: Callable, *arrays: np.ndarray) -> np.ndarray:
    values = [
        function(*elements) for elements in zip(*(array.flat for array in arrays), strict=True)
    ]
    return objects(values, arrays[0].shape)


def _integers(array: Any) -> list[int]:
    if any(is_symbolic(element) or isinstance(element, Ratio) for element in array.flat):
        raise Unknown
    return [int(element) for element in array.flat]


def _array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else objects([value], ())


def _axes(node: onnx.NodeProto, operand: np.ndarray | None) -> tuple[int, ...] | None:
    if operand is not None:
        return tuple(_integers(operand))
    axes = attribute(node, "axes")
    return None if axes is None else tuple(axes)


def _cast(extents: Extents, node: onnx.NodeProto, data: np.ndarray) -> np.ndarray:
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(attribute(node, "to"))).kind
    if kind == "f":
        return _mapped(lambda x: x if isinstance(x, Ratio) else Ratio(x, 1), data)
    if kind == "b":
        return _mapped(lambda x: not extents.compare("Equal")(x, 0), data)
    if kind not in "iu":
        raise Unknown

    def truncated(x: Element) -> Element:
        if isinstance(x, Ratio) and not extents.proves(x.numerator >= 0):
            raise Unknown
        return extents.rounded(x)

    return _mapped(truncated, data)


def _gather(
    extents: Extents, node: onnx.NodeProto, data: np.ndarray, indices: np.ndarray
) -> np.ndarray:
    places = np.array(_integers(indices), int).reshape(indices.shape)
    return _array(np.take(data, places, attribute(node, "axis", 0)))


def _slice(extents: Extents, node: onnx.NodeProto, data: np.ndarray, *bounds: Any) -> np.ndarray:
    if bounds:
        starts, ends, axes, steps = [*bounds, None, None][:4]
        starts, ends = _integers(starts), _integers(ends)
        axes = range(len(starts)) if axes is None else _integers(axes)
        steps = [1] * len(starts) if steps is None else _integers(steps)
    else:
        starts, ends = attribute(node, "starts"), attribute(node, "ends")
        axes, steps = attribute(node, "axes", range(len(starts))), [1] * len(starts)
    index = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        lowest = -data.shape[axis] - 1
        index[axis] = slice(start, None if step < 0 and end < lowest else end, step)
    return data[tuple(index)]


def _split(
    extents: Extents, node: onnx.NodeProto, data: np.ndarray, sizes: Any = None
) -> list[np.ndarray]:
    axis, count = attribute(node, "axis", 0), len(node.output)
    if sizes is None:
        sections = attribute(node, "split")
        whole = -(-data.shape[axis] // count)
        sizes = sections or [whole] * (count - 1)
    else:
        sizes = _integers(sizes)
    places = np.cumsum(list(sizes))[: count - 1]
    return list(np.split(data, places, axis))


def _reshape(
    extents: Extents, node: onnx.NodeProto, data: np.ndarray, shape: np.ndarray
) -> np.ndarray:
    return data.reshape(_integers(shape))


def _expand(
    extents: Extents, node: onnx.NodeProto, data: np.ndarray, shape: np.ndarray
) -> np.ndarray:
    return np.broadcast_to(data, np.broadcast_shapes(data.shape, tuple(_integers(shape)))).copy()


def _unsqueeze(
    extents: Extents, node: onnx.NodeProto, data: np.ndarray, axes: Any = None
) -> np.ndarray:
    return np.expand_dims(data, _axes(node, axes))


def _squeeze(
    extents: Extents, node: onnx.NodeProto, data: np.ndarray, axes: Any = None
) -> np.ndarray:
    return _array(np.squeeze(data, _axes(node, axes)))


def _where(
    extents: Extents, node: onnx.NodeProto, condition: np.ndarray, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    return _mapped(lambda c, x, y: x if c else y, *np.broadcast_arrays(condition, a, b))


def _reduced(name: str) -> Callable:
    def apply(extents: Extents, node: onnx.NodeProto, data: Any, axes: Any = None) -> np.ndarray:
        axes = _axes(node, axes)
        if data.ndim != 1 or axes not in (None, (0,), (-1,)):
            raise Unknown
        function, result = getattr(extents, name), data.flat[0]
        for element in data.flat[1:]:
            result = function(result, element)
        return objects([result], (1,) if attribute(node, "keepdims", 1) else ())

    return apply


def _transpose(extents: Extents, node: onnx.NodeProto, data: np.ndarray) -> np.ndarray:
    order = attribute(node, "perm")
    return data.transpose(order) if order else data.transpose()


def _concat(extents: Extents, node: onnx.NodeProto, *parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts, axis=attribute(node, "axis", 0))


def _logical(function: Callable) -> Callable:
    def apply(extents: Extents, node: onnx.NodeProto, *operands: np.ndarray) -> np.ndarray:
        return _mapped(
            lambda *values: function(*map(bool, values)), *np.broadcast_arrays(*operands)
        )

    return apply


#: Operators of truth values.
_LOGIC = ("And", "Not", "Or", "Xor")

#: The truth value of an operand that decides the result.
_DECIDED_BY = {"And": False, "Or": True}

_RELATIONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")

#: The functions of operators on arrays of objects.
_FUNCTIONS: dict[str, Callable] = {
    **{kind: _relation(kind) for kind in _RELATIONS},
    "Add": _elementwise("add"),
    "And": _logical(lambda a, b: a and b),
    "Not": _logical(lambda a: not a),
    "Or": _logical(lambda a, b: a or b),
    "Xor": _logical(lambda a, b: a != b),
    "Cast": _cast,
    "Ceil": lambda e, node, data: _mapped(lambda x: Ratio(e.rounded(x, up=True), 1), data),
    "Concat": _concat,
    "Div": _elementwise("divide"),
    "Expand": _expand,
    "Floor": lambda e, node, data: _mapped(lambda x: Ratio(e.rounded(x), 1), data),
    "Gather": _gather,
    "Identity": lambda e, node, data: data,
    "Max": _elementwise("largest"),
    "Min": _elementwise("least"),
    "Mod": _elementwise("modulo"),
    "Mul": _elementwise("multiply"),
    "Pow": _elementwise("power"),
    "Transpose": _transpose,
    "Neg": lambda e, node, data: _mapped(lambda x: e.multiply(x, -1), data),
    "ReduceMax": _reduced("largest"),
    "ReduceMin": _reduced("least"),
    "ReduceProd": _reduced("multiply"),
    "ReduceSum": _reduced("add"),
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": _elementwise("subtract"),
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
