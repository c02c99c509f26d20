"""Converters of convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.relax import op
from tvm.relax.frontend.onnx import onnx_frontend

from ..extents.values import Element, is_symbolic
from .converters import (
    Attrs,
    Builder,
    Inputs,
    Refused,
    Result,
    _converts,
    _dtype,
    _extents,
    _like,
    _rank,
    _text,
)
from .places import places_of_largest
from .symbolic import arithmetic


def _padded(
    bb: Builder, data: relax.Expr, kernel: Sequence[int], attrs: Attrs, value: float = 0.0
) -> relax.Expr:
    """Replace ``auto_pad`` by widths, as TVM pads the data by a separate function, or wrongly.

    Returns the data, which is padded itself where a width depends on a symbolic extent.
    """
    mode = _text(attrs, "auto_pad", "NOTSET")
    attrs.pop("auto_pad", None)
    count = len(kernel)
    if mode == "VALID":
        attrs["pads"] = [0] * (2 * count)
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        return data
    strides = attrs.get("strides") or [1] * count
    dilations = attrs.get("dilations") or [1] * count
    extents, cuts = arithmetic(attrs), []
    starts: list[Element] = [0] * count
    ends: list[Element] = [0] * count
    widths = [0] * (2 * _rank(data))
    for i, extent in enumerate(_extents(data)[2:]):
        window = (kernel[i] - 1) * dilations[i] + 1
        if is_symbolic(extent) and strides[i] == 1:
            extent = 1  # the padding is the same for every extent
        steps = extents.quotient([extents.add(extent, strides[i] - 1)], [strides[i]])
        length = extents.add(extents.product([extents.subtract(steps, 1), strides[i]]), window)
        total = extents.largest(extents.subtract(length, extent), 0)
        less = extents.quotient([total], [2])
        first = less if mode == "SAME_UPPER" else extents.subtract(total, less)
        if not is_symbolic(extent):
            starts[i], ends[i] = first, extents.subtract(total, first)
            continue
        # The widths are constant, and a slice of the padded data begins at the first window.
        widths[2 * i + 4], widths[2 * i + 5] = window, window
        begin = extents.subtract(window, first)
        cuts.append((i + 2, begin, extents.add(begin, length)))
    attrs["pads"] = [*starts, *ends]
    if cuts:
        data = bb.emit(op.nn.pad(data, widths, "constant", value))
        for axis, begin, end in cuts:
            data = bb.emit(op.strided_slice(data, [axis], [begin], [end], [1], assume_inbound=True))
    return data


@_converts("Conv")
def _conv(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    kernel = attrs.get("kernel_shape") or _extents(inputs[1])[2:]
    inputs[0] = _padded(bb, inputs[0], kernel, attrs)
    return None


@_converts("ConvTranspose")
def _conv_transpose(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    wanted = attrs.pop("output_shape", None)
    if not wanted:
        return None
    extents = _extents(inputs[0])[2:]
    count = len(extents)
    if not all(isinstance(extent, int) for extent in extents):
        raise Refused(
            "it has an output_shape, and its operand a symbolic one; give the extents: shapes={...}"
        )
    kernel = attrs.get("kernel_shape") or _extents(inputs[1])[2:]
    strides = attrs.get("strides") or [1] * count
    dilations = attrs.get("dilations") or [1] * count
    extra = attrs.get("output_padding") or [0] * count
    upper = _text(attrs, "auto_pad", "NOTSET") == "SAME_UPPER"
    attrs.pop("auto_pad", None)
    starts, ends, added = [], [], []
    for i, size in enumerate(wanted[-count:]):
        total = strides[i] * (extents[i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - size
        added.append(extra[i] + max(-total, 0))  # a larger result ends in zeros
        total = max(total, 0)
        less, more = total // 2, total - total // 2
        starts.append(less if upper else more)
        ends.append(more if upper else less)
    attrs["pads"], attrs["output_padding"] = [*starts, *ends], added
    return None


@_converts("MaxPool")
def _max_pool(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """The largest elements of windows, and their places."""
    data = inputs[0]
    dtype = _dtype(data)
    lowest = np.finfo(dtype).min if "float" in dtype else np.iinfo(dtype).min
    inputs[0] = _padded(bb, data, attrs["kernel_shape"], attrs, float(lowest))
    if attrs["tvm_custom"]["num_outputs"] < 2:
        return None
    convert = onnx_frontend._get_convert_map()["MaxPool"].get_converter(opset)
    values = bb.emit(convert(bb, inputs, dict(attrs), [{}, {}]))
    return relax.Tuple([values, places_of_largest(bb, data, values, attrs)])


@_converts("LpPool")
def _lp_pool(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    inputs[0] = _padded(bb, inputs[0], attrs["kernel_shape"], attrs)
    return None


@_converts("AveragePool")
def _average_pool(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """The mean of a window has the number of its elements that are not padding."""
    data, mode = inputs[0], attrs.get("auto_pad", b"")
    padded = _padded(bb, data, attrs["kernel_shape"], attrs)
    if padded is data:
        return None
    inputs[0] = padded
    if attrs.get("count_include_pad", 0):
        return None
    ones = bb.emit(
        op.full(relax.ShapeExpr([1, 1, *_extents(data)[2:]]), _like(1, data), _dtype(data))
    )
    convert = onnx_frontend._get_convert_map()["AveragePool"].get_converter(opset)
    shares = _padded(bb, ones, attrs["kernel_shape"], {**attrs, "auto_pad": mode})
    settings = {**attrs, "count_include_pad": 1}
    sums, counts = (
        bb.emit(convert(bb, [tensor], settings, [{}, {}])) for tensor in (padded, shares)
    )
    return op.divide(sums, counts)
