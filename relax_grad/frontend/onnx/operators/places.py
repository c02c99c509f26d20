"""Places of the largest elements of windows, and the return of elements to their places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.frontend.onnx import onnx_frontend

from ..extents.values import is_symbolic
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Refused,
    Result,
    _constant,
    _converts,
    _dtype,
    _extents,
    _float_dtype,
    _like,
    _rank,
)

#: The most elements of a window whose places are compared.
_MOST_ELEMENTS = 256


def places_of_largest(
    bb: Builder, data: relax.Expr, values: relax.Expr, attrs: Attrs
) -> relax.Expr:
    """Return the places of the largest elements of windows in the data without axes, as ``MaxPool``
    does: of equal elements, that of the first.

    Parameters
    ----------
    data : relax.Expr
        The data, ``(batch, channels, ...)``.
    values : relax.Expr
        The largest elements.
    attrs : dict
        The attributes of the node, with ``pads`` for ``auto_pad``.
    """
    kernel = list(attrs["kernel_shape"])
    count = len(kernel)
    extents, steps = _extents(data), _extents(values)[2:]
    if any(map(is_symbolic, [*extents[1:], *steps])):
        raise Refused(
            f"its places are results, and its data has the extents {extents}; give the "
            "extents after the first: shapes={...}"
        )
    if math.prod(kernel) > _MOST_ELEMENTS:
        raise Refused(
            f"its places are results, and its windows have {math.prod(kernel)} elements; at most "
            f"{_MOST_ELEMENTS} are supported"
        )
    strides = list(attrs.get("strides") or [1] * count)
    dilations = list(attrs.get("dilations") or [1] * count)
    starts = list(attrs.get("pads") or [0] * (2 * count))[:count]
    widths = [0] * (2 * (count + 2))
    for i in range(count):
        reach = (steps[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1
        widths[2 * i + 4] = starts[i]
        widths[2 * i + 5] = max(reach - starts[i] - extents[i + 2], 0)
    if any(widths):
        lowest = -math.inf if "float" in _dtype(data) else 0
        data = bb.emit(op.nn.pad(data, widths, "constant", lowest))
    axes = list(range(2, count + 2))
    parts = []
    for offset in itertools.product(*map(range, kernel)):
        begin = [number * dilation for number, dilation in zip(offset, dilations, strict=True)]
        end = [
            first + (number - 1) * stride + 1
            for first, number, stride in zip(begin, steps, strides, strict=True)
        ]
        parts.append(bb.emit(op.strided_slice(data, axes, begin, end, strides)))
    number = bb.emit(op.argmax(bb.emit(op.stack(parts, 0)), 0))
    channels = extents[1]
    factors = _factors(extents[2:], attrs.get("storage_order", 0))
    total = _along(bb, extents[0], 0, count + 2, channels * math.prod(extents[2:]))
    second = _along(bb, channels, 1, count + 2, math.prod(extents[2:]))
    total = bb.emit(op.add(total, second))
    for i in range(count):
        inner = relax.const(math.prod(kernel[i + 1 :]), "int64")
        offset = bb.emit(op.floor_divide(number, inner))
        offset = bb.emit(op.floor_mod(offset, relax.const(kernel[i], "int64")))
        offset = bb.emit(op.multiply(offset, relax.const(dilations[i], "int64")))
        first = _along(bb, steps[i], i + 2, count + 2, strides[i])
        place = bb.emit(op.add(bb.emit(op.subtract(first, _like(starts[i], first))), offset))
        # A window of -inf and padding has no place.
        place = bb.emit(op.clip(place, 0, extents[i + 2] - 1))
        total = bb.emit(op.add(total, bb.emit(op.multiply(place, _like(factors[i], place)))))
    return total


def _factors(extents: Sequence[int], storage_order: int) -> list[int]:
    """Return the distances of neighbours along each axis, with the rows or the columns together."""
    if storage_order:
        return [math.prod(extents[:i]) for i in range(len(extents))]
    return [math.prod(extents[i + 1 :]) for i in range(len(extents))]


def _along(bb: Builder, extent: tirx.Expr | int, axis: int, rank: int, factor: int) -> relax.Expr:
    """Return the multiples of a factor along an axis."""
    shape: list[tirx.Expr | int] = [1] * rank
    shape[axis] = extent
    numbers = bb.emit(op.arange(0, extent, 1, "int64"))
    numbers = bb.emit(op.reshape(numbers, relax.ShapeExpr(shape)))
    return bb.emit(op.multiply(numbers, relax.const(factor, "int64")))


@_converts("MaxUnpool")
def _max_unpool(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Return elements to their places in zeros, whose extents are those that the windows cover."""
    data, places = inputs[:2]
    extents, kernel = _extents(data), list(attrs["kernel_shape"])
    count = len(kernel)
    if _rank(data) != count + 2 or any(map(is_symbolic, extents[1:])):
        raise Refused(
            f"its data has the extents {extents}; it needs known extents after the "
            f"first, and {count} after the channels: shapes={{...}}"
        )
    strides = list(attrs.get("strides") or [1] * count)
    pads = list(attrs.get("pads") or [0] * (2 * count))
    shape = extents[:2] + [
        (extents[i + 2] - 1) * strides[i] + kernel[i] - pads[i] - pads[i + count]
        for i in range(count)
    ]
    given = _constant(inputs[2], "output_shape") if len(inputs) > 2 else None
    if given is not None and given.tolist() != shape:
        raise Refused(
            f"its output_shape is {given.tolist()}, and its windows cover {shape}; ONNX and ONNX "
            "Runtime count the places of its indices in different ones: leave it out"
        )
    total, count = (relax.ShapeExpr([math.prod(numbers)]) for numbers in (shape, extents))
    zeros = bb.emit(op.zeros(total, _dtype(data)))
    places, data = (bb.emit(op.reshape(tensor, count)) for tensor in (places, data))
    result = bb.emit(op.scatter_elements(zeros, places, data, 0))
    return op.reshape(result, relax.ShapeExpr(shape))


@_converts("NonMaxSuppression")
def _suppressed(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """TVM's converter takes other defaults for bounds that are left out, or computed at run
    time, and TVM's operator takes positive scores and a positive bound of the overlap only."""
    operands = [inputs[i] if i < len(inputs) else None for i in range(5)]
    names = ("max_output_boxes_per_class", "iou_threshold", "score_threshold")
    count, overlap, least = (
        None if value is None else value.item() for value in map(_constant, operands[2:], names)
    )
    scores, least = operands[1], -math.inf if least is None else least
    if least < 0:
        # The ranks of the scores have the same order. Those of the best boxes are the largest.
        ranks = bb.emit(op.argsort(scores, -1, descending=True))
        ranks = bb.emit(op.astype(bb.emit(op.argsort(ranks, -1)), _dtype(scores)))
        total = _like(int(_extents(scores)[-1]), scores)
        is_high = bb.emit(op.greater(scores, _like(least, scores)))
        scores = bb.emit(op.where(is_high, bb.emit(op.subtract(total, ranks)), _like(0, scores)))
        least = 0.0
    # TVM drops boxes from its bound of the overlap on, ONNX those beyond the bound.
    overlap = np.nextafter(np.float32(overlap or 0.0), np.float32(np.inf))
    overlap = max(float(overlap), float(np.finfo("float32").tiny))
    bounds = relax.const(count or 0, "int64"), relax.const(overlap, "float32")
    convert = onnx_frontend._get_convert_map()["NonMaxSuppression"].get_converter(opset)
    operands = [operands[0], scores, *bounds, relax.const(least, "float32")]
    return convert(bb, onnx_frontend.onnx_input(operands), attrs, [{}, {}])


@_converts("EyeLike")
def _eye_like(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Ones on a diagonal, of another dtype than the operand's too."""
    kind = _float_dtype(attrs, _dtype(inputs[0]))
    # The legalization of eye_like ignores the dtype.
    rows, columns = _extents(inputs[0])
    return op.eye(rows, columns, attrs.get("k", 0), kind)
