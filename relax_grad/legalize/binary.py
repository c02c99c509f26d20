"""Legalization of element-wise functions of two or more arguments, for which TVM's is wrong or
missing."""

from __future__ import annotations

from tvm import relax

from ..ir.compat import dtype_of
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
