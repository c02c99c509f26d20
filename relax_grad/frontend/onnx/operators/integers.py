"""Converters of operators on integers and of remainders, at the edges of their operands."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op
from tvm.relax.frontend.onnx import onnx_frontend

from .converters import (
    Attrs,
    Builder,
    Converter,
    Inputs,
    Refused,
    Result,
    _converts,
    _dtype,
    _folds,
    _is_float,
    _like,
    _text,
)


@_converts("BitShift")
def _bit_shift(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """A shift by a negative number, or by the width or more, leaves the sign only."""
    data, count = inputs[0], inputs[1]
    if _folds([data, count]):
        return None
    direction = _text(attrs, "direction", "")
    if direction not in ("LEFT", "RIGHT"):
        raise Refused(f"its attribute direction is {direction!r}; it must be 'LEFT' or 'RIGHT'")
    dtype, is_right = _dtype(data), direction == "RIGHT"
    width = np.dtype(dtype).itemsize * 8
    last, zero = _like(width - 1, data), _like(0, data)
    is_within = bb.emit(op.less_equal(count, last))
    if not dtype.startswith("uint"):
        is_within = bb.emit(op.logical_and(is_within, bb.emit(op.greater_equal(count, zero))))
    by = bb.emit(op.where(is_within, count, last))
    shifted = bb.emit((op.right_shift if is_right else op.left_shift)(data, by))
    if is_right and not dtype.startswith("uint"):
        return shifted  # the last shift leaves copies of the sign
    return op.where(is_within, shifted, zero)


@_converts("Mod")
def _remainder(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
    """Of floating-point numbers without ``fmod``, an infinite divisor leaves a number of its sign,
    and zero has the sign of the divisor."""
    data, divisor = inputs[0], inputs[1]
    if attrs.get("fmod", 0) or _folds([data, divisor]) or not _is_float(data):
        return None
    zero = _like(0, data)
    rest = bb.emit(op.floor_mod(data, divisor))
    is_negative = bb.emit(op.less(divisor, zero))
    differ = bb.emit(op.logical_xor(bb.emit(op.less(data, zero)), is_negative))
    ends = bb.emit(op.where(differ, divisor, data))
    is_end = _is_infinite(bb, divisor)
    is_number = bb.emit(op.logical_not(_is_infinite(bb, data)))
    is_number = bb.emit(op.logical_and(is_number, bb.emit(op.equal(data, data))))
    rest = bb.emit(op.where(bb.emit(op.logical_and(is_end, is_number)), ends, rest))
    is_zero = bb.emit(op.equal(bb.emit(op.where(is_number, data, _like(1, data))), zero))
    is_zero = bb.emit(op.logical_and(is_zero, bb.emit(op.greater(op.abs(divisor), zero))))
    is_zero = bb.emit(op.logical_or(is_zero, bb.emit(op.equal(rest, zero))))
    return op.where(is_zero, bb.emit(op.where(is_negative, _like(-0.0, data), zero)), rest)


def _is_infinite(bb: Builder, data: relax.Expr) -> relax.Var:
    return bb.emit(op.equal(bb.emit(op.abs(data)), _like(np.inf, data)))


def bools_as_integers(name: str) -> Converter:
    """Return the converter of a reduction to the largest or smallest of booleans, which TVM has for
    numbers only."""

    def convert(bb: Builder, inputs: Inputs, attrs: Attrs, opset: int) -> Result:
        data = bb.emit(op.astype(inputs[0], "uint8"))
        convert = onnx_frontend._get_convert_map()[name].get_converter(opset)
        operands = onnx_frontend.onnx_input([data, *list(inputs)[1:]])
        return op.astype(bb.normalize(convert(bb, operands, dict(attrs), [{}, {}])), "bool")

    return convert
