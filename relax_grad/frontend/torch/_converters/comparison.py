"""Converters of comparisons, and of logical and bitwise operators."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from ._call import converts, dtype, wide_dtype
from .elementwise import binary, promoted

COMPARISON: dict[str, Callable] = {}

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
    def convert(call, data, other):
        kind = promoted(call, "data", "other")
        operands = [call.tensor(operand, kind) for operand in (data, other)]
        if kind == "bool":
            operands = [call.cast(operand, "int8") for operand in operands]
        result = function(*operands)
        if function is _op.not_equal and "float" in kind:
            for operand in operands:  # TVM's != is false for NaN
                wrong = _op.isnan(call.cast(operand, wide_dtype(kind)))
                result = _op.logical_or(call.emit(result), wrong)
        return result

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
    converts(COMPARISON, *_names)(binary(getattr(_op, f"bitwise_{_name}"), logical=_function))


@converts(COMPARISON, "logical_not.default")
def _logical_not(call, data):
    return _op.logical_not(call.cast(data, "bool"))


@converts(COMPARISON, "bitwise_not.default")
def _bitwise_not(call, data):
    return (_op.logical_not if dtype(data) == "bool" else _op.bitwise_not)(data)
