"""Legalization of TVM's functions from numbers to truth values and back, which must stay apart from
products on a GPU."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..ir.compat import constant_value, dtype_of
from ..ir.dtypes import HALVES
from ..registry import register_legalize
from ._gpu import keep_masks_apart
from ._util import stock

_COMPARISONS = ("equal", "greater", "greater_equal", "less", "less_equal", "not_equal")

#: The operators that take numbers and return truth values, or the other way round.
_MASKED = ("astype", "isfinite", "isinf", "isnan", "where", *_COMPARISONS)

_DIFFERENT = "relax.not_equal"

_EQUALITIES = ("relax.equal", _DIFFERENT)

_WRONG = (
    "after a product on a GPU, reads and writes vectors of truth values as 16-bit integers; the "
    "equality of computed truth values does not compile on CPUs"
)


def _register(op_name: str) -> None:
    of_tvm = stock(op_name)

    @register_legalize(
        op_name,
        corrects=f"{_WRONG}; is False for NaN" if op_name == _DIFFERENT else _WRONG,
    )
    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if op_name in _EQUALITIES and dtype_of(call.args[0].ty) == "bool":
            differ = bb.normalize(relax.op.logical_xor(*call.args))
            return differ if op_name == _DIFFERENT else relax.op.logical_not(differ)
        if op_name == _DIFFERENT and "float" in dtype_of(call.args[0].ty):
            return _differ(bb, call, keep_masks_apart(bb, call, of_tvm(bb, call)))
        return keep_masks_apart(bb, call, of_tvm(bb, call))


for _name in _MASKED:
    _register(f"relax.{_name}")


def _differ(bb: relax.BlockBuilder, call: relax.Call, result: relax.Expr) -> relax.Expr:
    """Return the truth values of not_equal of floating-point numbers, given TVM's, which are False
    for NaN."""
    for operand in call.args:
        if not _is_a_number(operand):
            wide = operand
            if dtype_of(operand.ty) in HALVES:
                wide = bb.emit(relax.op.astype(operand, "float32"))
            result = relax.op.logical_or(bb.emit(result), bb.emit(relax.op.isnan(wide)))
    return result


def _is_a_number(operand: relax.Expr) -> bool:
    value = constant_value(operand)
    return value is not None and not np.isnan(value).any()
