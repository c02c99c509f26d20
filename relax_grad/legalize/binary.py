"""Legalization of element-wise functions of two or more arguments, for which TVM's is wrong or
missing."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from ..ir.compat import constant_value, dtype_of
from ..ir.dtypes import HALVES
from ..registry import LegalizeRule, register_legalize
from ..topi import binary as topi_binary
from ..topi.util import on_gpu
from ._util import stock

#: The operators that TVM does not compile in a half precision, and the targets.
_DO_NOT_COMPILE = {
    "relax.atan2": "does not compile in float16, and on a GPU in bfloat16",
    "relax.mod": "does not compile in bfloat16, and on a GPU in float16",
}


def _in_float32(op_name: str, *refused: str) -> LegalizeRule:
    of_tvm = stock(op_name)

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """Compute in float32 if TVM does not compile the operator in the dtype."""
        dtype = dtype_of(call.ty)
        if dtype not in refused:
            return of_tvm(bb, call)
        arguments = [relax.op.astype(argument, "float32") for argument in call.args]
        return relax.op.astype(relax.Call(call.op, arguments), dtype)

    return legalize


for _name, _wrong in _DO_NOT_COMPILE.items():
    register_legalize(_name, corrects=_wrong)(_in_float32(_name, *HALVES))


_power_in_float32 = _in_float32("relax.power", "bfloat16")


@register_legalize(
    "relax.power",
    corrects="does not compile in bfloat16; returns NaN for a negative base on a GPU, where it is "
    "2 to the power of a product with a logarithm",
)
def _power(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    dtype = dtype_of(call.ty)
    if not on_gpu() or dtype not in ("float16", "float32"):
        return _power_in_float32(bb, call)
    wide = [relax.op.astype(argument, "float64") for argument in call.args]
    return relax.op.astype(relax.Call(call.op, wide), dtype)


@register_legalize(
    "relax.log_add_exp", corrects="overflows for large arguments, and does not compile in bfloat16"
)
def _log_add_exp(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    x1, x2 = call.args
    return bb.call_te(
        topi_binary.log_add_exp,
        x1,
        x2,
        list(call.ty.shape.values),
        primfunc_name_hint="log_add_exp",
    )


@register_legalize("relax.ewise_fma")
def _ewise_fma(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return bb.call_te(topi_binary.ewise_fma, *call.args, primfunc_name_hint="ewise_fma")


def _with_zero(op_name: str, places: Sequence[int]) -> LegalizeRule:
    """Return the legalization of an operator whose argument at one of the places may be the
    constant 0."""
    of_tvm = stock(op_name)

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """Keep NaN in a product with 0, or in a quotient of 0."""
        for place in places:
            zero, other = _zero(call.args[place]), call.args[1 - place]
            if zero is not None and constant_value(other) is None:
                is_divisor = op_name == "relax.divide"
                return bb.call_te(
                    topi_binary.with_zero, other, zero, is_divisor, primfunc_name_hint="with_zero"
                )
        return of_tvm(bb, call)

    return legalize


def _zero(expr: relax.Expr) -> float | None:
    """Return the value of the scalar 0 or -0 of float32 or float64, or None for any other
    expression."""
    value = constant_value(expr)
    if value is None or value.ndim > 0 or value.dtype not in ("float32", "float64") or value:
        return None
    return float(value)


_FOLDS = "is 0 where the other argument is NaN, and an argument is the constant 0"

register_legalize("relax.multiply", corrects=_FOLDS)(_with_zero("relax.multiply", (0, 1)))
register_legalize("relax.divide", corrects=_FOLDS)(_with_zero("relax.divide", (0,)))
