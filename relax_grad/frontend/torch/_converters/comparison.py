"""Converters of comparisons, and of logical and bitwise operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import relax

from ._call import Call, converts, dtype, scalar
from ._support import Converter, Refused
from .elementwise import binary, promoted

COMPARISON: dict[str, Converter] = {}

_op = relax.op

_COMPARISONS = {
    "eq": _op.equal,
    "ne": _op.not_equal,
    "lt": _op.less,
    "le": _op.less_equal,
    "gt": _op.greater,
    "ge": _op.greater_equal,
}


def _comparison(function: Callable) -> Callable:
    def convert(call: Call, data: relax.Expr, other: float) -> relax.Expr:
        kind = promoted(call, "data", "other")
        operands = [call.tensor(operand, kind) for operand in (data, other)]
        if kind == "bool":
            operands = [call.cast(operand, "int8") for operand in operands]
        return function(*operands)

    return convert


for _name, _function in _COMPARISONS.items():
    converts(COMPARISON, f"{_name}.Tensor", f"{_name}.Scalar")(_comparison(_function))


def _logical(function: Callable) -> Callable:
    return lambda call, data, other: function(call.cast(data, "bool"), call.cast(other, "bool"))


for _name in ("and", "or", "xor"):
    _function = getattr(_op, f"logical_{_name}")
    converts(COMPARISON, f"logical_{_name}.default")(_logical(_function))
    _names = (
        f"{prefix}.{kind}"
        for prefix in (f"bitwise_{_name}", f"__{_name}__")
        for kind in ("Tensor", "Scalar")
    )
    converts(COMPARISON, *_names, f"bitwise_{_name}.Scalar_Tensor")(
        binary(getattr(_op, f"bitwise_{_name}"), logical=_function)
    )


@converts(COMPARISON, "logical_not.default")
def _logical_not(call: Call, data: relax.Expr) -> relax.Expr:
    return _op.logical_not(call.cast(data, "bool"))


@converts(COMPARISON, "bitwise_not.default")
def _bitwise_not(call: Call, data: relax.Expr) -> relax.Expr:
    return (_op.logical_not if dtype(data) == "bool" else _op.bitwise_not)(data)


@converts(
    COMPARISON,
    *("bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar"),
    *("bitwise_left_shift.Scalar_Tensor", "__lshift__.Tensor", "__lshift__.Scalar"),
    *("bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar"),
    *("bitwise_right_shift.Scalar_Tensor", "__rshift__.Tensor", "__rshift__.Scalar"),
)
def _shift(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    """A shift by the width or more, or by a negative number, drops all bits."""
    kind = promoted(call, "data", "other")
    if "int" not in kind:
        raise Refused(f"shifts of {kind} have no form in Relax; cast to integers")
    is_left = "left" in call.node.target.__name__ or "lshift" in call.node.target.__name__
    data, other = call.tensor(data, kind), call.tensor(other, kind)
    zero, width = scalar(0, kind), scalar(np.iinfo(kind).bits, kind)
    inside = [call.emit(_op.less(other, width))]
    if not kind.startswith("u"):
        inside.append(call.emit(_op.greater_equal(other, zero)))
    known = inside[0] if len(inside) == 1 else call.emit(_op.logical_and(*inside))
    safe = call.emit(_op.where(known, other, zero))
    dropped = zero
    if not is_left and not kind.startswith("u"):
        dropped = call.emit(_op.where(_op.less(data, zero), scalar(-1, kind), zero))
    shifted = call.emit((_op.left_shift if is_left else _op.right_shift)(data, safe))
    return _op.where(known, shifted, dropped)
