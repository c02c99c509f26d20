"""Converters of operators whose operands are extents that the graph computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from tvm import relax, tirx
from tvm.relax import op

from ....ir.compat import constant_value
from ..extents.evaluate import known_constant
from ..extents.values import Extents, Known, Ratio, is_symbolic, objects, plain
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Refused,
    Result,
    _converts,
    _dtype,
    _extents,
    _is_tensor,
    _rank,
)

#: The operands of which converters take the elements, by the operators.
TAKES_ELEMENTS = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (3,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
}

#: The end of an axis, in slices.
_BEYOND = 10**9

#: An integer that is no index.
_NO_INDEX = {"int32": -(2**31), "int64": -(2**63)}


def elements_of(inputs: Inputs, attrs: Attrs, i: int) -> Known | None:
    """Return the elements of an operand, or None if they are known only at run time, or it is left
    out."""
    known = attrs["tvm_custom"].get("known")
    if known is not None and i < len(known) and known[i] is not None:
        return known[i]
    value = inputs[i]
    if value is None:
        return None
    if isinstance(value, relax.ShapeExpr):
        return Known(objects(map(plain, value.values)), "int64")
    if isinstance(value, tirx.IntImm):
        return Known(objects([int(value)], ()), "int64")
    constant = constant_value(value) if _is_tensor(value) else None
    return None if constant is None else known_constant(constant)


def arithmetic(attrs: Attrs) -> Extents:
    """Return the arithmetic of the extents of a model."""
    return attrs.get("tvm_custom", {}).get("extents") or Extents()


def tensor_of(bb: Builder, known: Known) -> relax.Expr:
    """Return the tensor of known elements."""
    if not known.is_symbolic:
        numbers = [
            element.numerator / element.denominator if isinstance(element, Ratio) else element
            for element in known.elements.ravel().tolist()
        ]
        return relax.const(
            np.array(numbers, known.dtype).reshape(known.elements.shape), known.dtype
        )
    elements = known.elements.ravel().tolist()
    parts = [_scalar(bb, element, known.dtype) for element in elements]
    whole = parts[0] if len(parts) == 1 else bb.emit(op.concat(parts, 0))
    if known.elements.shape == (len(parts),):
        return whole
    return bb.emit(op.reshape(whole, known.elements.shape))


def _scalar(bb: Builder, value: tirx.Expr | int, dtype: str) -> relax.Expr:
    """Return a tensor of one element."""
    number, divisor = value if isinstance(value, Ratio) else (value, 1)
    if not is_symbolic(number):
        return relax.const(np.array([number / divisor if divisor > 1 else number], dtype), dtype)
    tensor = bb.emit(op.arange(number, number + 1, 1, "int64"))
    if dtype != "int64":
        tensor = bb.emit(op.astype(tensor, dtype))
    if divisor > 1:
        tensor = bb.emit(op.divide(tensor, relax.const(divisor, dtype)))
    return tensor


def _numbers(known: Known | None) -> list | None:
    return None if known is None else list(known.elements.flat)


def _unknown(what: str) -> Refused:
    return Refused(
        f"{what} is known only at run time, and is not computed from extents; give the extents "
        "of the inputs: shapes={...}"
    )


def _is_computed(value: object) -> bool:
    """Tell whether an operand is a tensor that is computed at run time."""
    return _is_tensor(value) and constant_value(value) is None


@_converts("Reshape")
def _reshape(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data, known = inputs[0], elements_of(inputs, attrs, 1)
    wanted = _numbers(known) if known is not None else attrs.get("shape")
    if wanted is None or not _is_tensor(data) or not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    shape, extents = _extents(data), arithmetic(attrs)
    if not attrs.get("allowzero", 0):
        wanted = [
            shape[i] if not is_symbolic(extent) and extent == 0 else extent
            for i, extent in enumerate(wanted)
        ]
    free = [i for i, extent in enumerate(wanted) if not is_symbolic(extent) and extent == -1]
    if len(free) > 1:
        return None
    if free:
        others = [extent for i, extent in enumerate(wanted) if i != free[0]]
        if not any(map(is_symbolic, [*shape, *others])):
            return None
        wanted[free[0]] = extents.quotient(shape, others)
    elif not any(map(is_symbolic, wanted)):
        return None
    return op.reshape(data, relax.ShapeExpr(wanted))


@_converts("Expand")
def _expand(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Broadcast in both directions: an extent of 1 of the operand or of the shape becomes the
    other's."""
    data, wanted = inputs[0], _numbers(elements_of(inputs, attrs, 1))
    if wanted is None and _is_computed(inputs[1]):
        # TVM's converter broadcasts in one direction.
        raise _unknown("its shape")
    if wanted is None or not _is_tensor(data):
        return None
    shape, extents = _extents(data), arithmetic(attrs)
    rank = max(len(shape), len(wanted))
    shape = [1] * (rank - len(shape)) + shape
    wanted = [1] * (rank - len(wanted)) + wanted
    for i, (own, other) in enumerate(zip(shape, wanted, strict=True)):
        is_one = not is_symbolic(other) and other in (1, -1)
        if is_one or extents.equal(own, other):
            wanted[i] = own
        elif is_symbolic(own) or own != 1:
            raise Refused(
                f"it broadcasts the extent {own} to {other}, which are not known to be equal; "
                "give the inputs the same symbols or extents: shapes={...}"
            )
    if len(wanted) == _rank(data) and all(map(extents.equal, shape, wanted)):
        return data
    return op.broadcast_to(data, relax.ShapeExpr(wanted))


@_converts("ConstantOfShape")
def _constant_of_shape(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    shape = _numbers(elements_of(inputs, attrs, 0))
    if shape is None and _is_computed(inputs[0]):
        raise _unknown("its shape")
    if shape is None or not any(map(is_symbolic, shape)):
        return None
    value = (
        onnx.numpy_helper.to_array(attrs["value"]) if "value" in attrs else np.zeros(1, "float32")
    )
    dtype = str(value.dtype)
    return op.full(relax.ShapeExpr(shape), relax.const(value.reshape(()), dtype), dtype)


@_converts("Range")
def _range(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    bounds = [elements_of(inputs, attrs, i) for i in range(3)]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < 3 or not any(bound.is_symbolic for bound in known):
        return None
    extents, dtype = arithmetic(attrs), known[0].dtype
    limits: list[Any] = [bound.elements.item() for bound in known]
    start, limit, step = limits
    if is_symbolic(step):
        raise _unknown(f"its step {step}")
    number, divisor = step if isinstance(step, Ratio) else (step, 1)
    distance = extents.subtract(limit, start)
    if number < 0:
        distance, number = extents.multiply(distance, -1), -number
    distance, over = distance if isinstance(distance, Ratio) else (distance, 1)
    if over > 1 or divisor > 1:
        distance, number = extents.product([distance, divisor]), number * over
    count = extents.quotient([extents.add(distance, number - 1)], [number])
    count = extents.largest(count, 0)
    places = bb.emit(op.arange(0, count, 1, "int64"))
    if dtype != "int64":
        places = bb.emit(op.astype(places, dtype))
    first, stride = (tensor_of(bb, Known(objects([value], ()), dtype)) for value in (start, step))
    return op.add(bb.emit(op.multiply(places, stride)), first)


@_converts("Slice")
def _slice(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    data = inputs[0]
    if not _is_tensor(data):
        return None
    if opset < 10:
        starts, ends = list(attrs["starts"]), list(attrs["ends"])
        axes, steps = attrs.get("axes"), None
    else:
        known = [elements_of(inputs, attrs, i) for i in range(1, 5)]
        if any(operand is None and inputs[i] is not None for i, operand in enumerate(known, 1)):
            return None
        numbers: list[Any] = [_numbers(operand) for operand in known]
        starts, ends, axes, steps = numbers
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    shape = _extents(data)
    bounds = list(zip((axis % len(shape) for axis in axes), starts, ends, steps, strict=True))
    if any(map(is_symbolic, [*starts, *ends, *steps, *(shape[bound[0]] for bound in bounds)])):
        for bound in bounds:
            data = bb.normalize(_sliced(bb, data, attrs, *bound))
        return data
    taken = []
    for axis, start, end, step in bounds:
        if step > 0 and end >= _BEYOND:
            if start == 0 and step == 1:
                continue
            end = shape[axis]
        taken.append((axis, start, end, step))
    return op.strided_slice(data, *map(list, zip(*taken, strict=True))) if taken else data


def _sliced(
    bb: Builder,
    data: relax.Expr,
    attrs: Attrs,
    axis: int,
    start: tirx.Expr | int,
    end: tirx.Expr | int,
    step: tirx.Expr | int,
) -> relax.Expr:
    """Return a slice of an axis, whose bounds or whose extent are computed extents."""
    extents = arithmetic(attrs)
    extent = _extents(data)[axis]
    if is_symbolic(step):
        raise Refused(
            f"its step {step} is a computed extent; give the extents of the inputs: shapes={{...}}"
        )
    if step < 0:
        return _backwards(bb, data, extents, axis, start, end=end, step=step)
    start, end = (_from_front(extents, bound, extent) for bound in (start, end))
    start = extents.largest(start, 0)
    if not extents.proves(start <= extent):
        start = extents.least(start, extent)
    if not is_symbolic(end) and end >= _BEYOND:
        end = extent
    if not extents.proves(end <= extent):
        if not is_symbolic(extent):  # the front of a table, such as of positions
            require = attrs["tvm_custom"].get("require")
            if require is not None:
                require(end <= extent, f"a table of {extent} rows is read up to the row {end}")
            return _front(bb, data, axis, extents, start, end=end, step=step)
        end = extents.least(end, extent)
    end = extents.largest(end, start)
    if step == 1 and extents.equal(start, 0) and extents.equal(end, extent):
        return data
    return op.strided_slice(data, [axis], [start], [end], [step], assume_inbound=True)


def _backwards(
    bb: Builder,
    data: relax.Expr,
    extents: Extents,
    axis: int,
    start: tirx.Expr | int,
    end: tirx.Expr | int,
    step: int,
) -> relax.Expr:
    """Return a slice with a negative step."""
    extent = _extents(data)[axis]
    last = extents.add(extent, -1)
    if not is_symbolic(start) and start >= _BEYOND:
        start = last
    else:
        start = extents.least(_from_front(extents, start, extent, -1), last)
    is_open = not is_symbolic(end) and end <= -_BEYOND
    end = -1 if is_open else _from_front(extents, end, extent, -1)
    distance = extents.add(extents.subtract(start, end), -step - 1)
    count = extents.quotient([extents.largest(distance, 0)], [-step])
    places = bb.emit(op.arange(0, count, 1, "int64"))
    first, stride = (tensor_of(bb, Known(objects([value], ()), "int64")) for value in (start, step))
    places = bb.emit(op.add(bb.emit(op.multiply(places, stride)), first))
    return op.take(data, places, axis, "clip")


def _from_front(
    extents: Extents, bound: tirx.Expr | int, extent: tirx.Expr | int, lowest: int = 0
) -> tirx.Expr | int:
    """Return a bound of a slice without negative numbers, which count from the end of the axis."""
    if extents.proves(bound >= 0):
        return bound
    if extents.proves(bound < 0):
        return extents.largest(extents.add(bound, extent), lowest)
    if extents.proves(bound <= 0) and extents.proves(bound + extent >= 0):  # 0 is the front
        return extents.modulo(extents.add(bound, extent), extent)
    raise Refused(
        f"its bound {bound} may be negative or not; give the extents of the inputs: shapes={{...}}"
    )


def _front(
    bb: Builder,
    data: relax.Expr,
    axis: int,
    extents: Extents,
    start: tirx.Expr | int,
    end: tirx.Expr | int,
    step: tirx.Expr | int,
) -> relax.Expr:
    """Return the elements of a table up to a symbolic end; elements after the end are NaN, and
    integers no index."""
    count = extents.quotient([extents.add(extents.subtract(end, start), step - 1)], [step])
    places = bb.emit(op.arange(0, count, 1, "int64"))
    if step != 1 or is_symbolic(start) or start:
        first, stride = (
            tensor_of(bb, Known(objects([value], ()), "int64")) for value in (start, step)
        )
        places = bb.emit(op.add(bb.emit(op.multiply(places, stride)), first))
    dtype = _dtype(data)
    if "float" in dtype:
        return op.take(data, places, axis, "nan")
    if dtype == "bool":
        data = bb.emit(op.astype(data, "int8"))
        return op.astype(bb.emit(op.take(data, places, axis, "clip")), "bool")
    taken = bb.emit(op.take(data, places, axis, "clip"))
    is_there = bb.emit(op.less(places, relax.const(_extents(data)[axis], "int64")))
    is_there = bb.emit(op.reshape(is_there, [-1 if i == axis else 1 for i in range(_rank(data))]))
    return op.where(is_there, taken, relax.const(_NO_INDEX.get(dtype, 0), dtype))


@_converts("Tile")
def _tile(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Repeat by a new axis before each."""
    repeats = _numbers(elements_of(inputs, attrs, 1)) if opset >= 6 else None
    if repeats is None or not _is_tensor(inputs[0]):
        return None
    if not any(map(is_symbolic, repeats)):
        return op.tile(inputs[0], repeats)
    shape, extents = _extents(inputs[0]), arithmetic(attrs)
    pairs = list(zip(repeats, shape, strict=True))
    data = bb.emit(op.reshape(inputs[0], [extent for _, own in pairs for extent in (1, own)]))
    data = bb.emit(op.broadcast_to(data, [extent for pair in pairs for extent in pair]))
    return op.reshape(data, relax.ShapeExpr([extents.product(pair) for pair in pairs]))


@_converts("Split")
def _split(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Relax splits axes of known extents; parts of others are slices."""
    data, sizes = inputs[0], attrs.get("split")
    if not _is_tensor(data) or not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    axis = attrs.get("axis", 0) % _rank(data)
    extent, extents, count = (
        _extents(data)[axis],
        arithmetic(attrs),
        attrs["tvm_custom"]["num_outputs"],
    )
    if opset >= 13:
        sizes = _numbers(elements_of(inputs, attrs, 1))
        if sizes is None and inputs[1] is not None:
            raise _unknown("a size of its parts")
    if not any(map(is_symbolic, [extent, *(sizes or [])])):
        return None
    if sizes is None:
        count = attrs.get("num_outputs", count)
        whole = extents.quotient([extents.add(extent, count - 1)], [count])
        sizes = [whole] * (count - 1)
        sizes.append(extents.subtract(extent, extents.product([whole, count - 1])))
        if not extents.proves(sizes[-1] >= 0):
            raise Refused(
                f"the extent {extent} may be too small for {count} parts; give it: shapes={{...}}"
            )
    parts: list[relax.Expr] = []
    start: tirx.Expr | int = 0
    for i, size in enumerate(sizes):
        end = extent if i == len(sizes) - 1 else extents.add(start, size)
        part = op.strided_slice(data, [axis], [start], [end], [1], assume_inbound=True)
        parts.append(bb.emit(part))
        start = end
    return parts[0] if len(parts) == 1 else relax.Tuple(parts)


@_converts("Squeeze")
def _squeeze(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """An axis of a symbolic extent is not known to be 1."""
    data = inputs[0]
    if not _is_tensor(data) or not isinstance(data.ty.shape, relax.ShapeExpr):
        return None
    axes = _numbers(elements_of(inputs, attrs, 1)) if opset >= 13 else attrs.get("axes")
    shape = _extents(data)
    for axis in range(len(shape)) if axes is None else axes:
        if is_symbolic(shape[axis]):
            raise Refused(
                f"the extent {shape[axis]} of its axis {axis} must be 1, or its axes must be "
                "given; give the extents of the inputs: shapes={...}"
            )
    return None
