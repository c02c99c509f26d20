"""Legalization of element-wise functions of one argument, for which TVM's is wrong."""

from __future__ import annotations

from tvm import relax
from tvm.ir import Op

from ..ir.compat import dtype_of
from ..registry import register_legalize
from ..topi.util import on_gpu
from ._util import stock

_REFUSES = "refuses float16 on CPU, which has no such function"
_CANCELS = "returns 0 for small arguments in float16, by cancellation"
_ROUNDS = "rounds every intermediate result to float16"

#: The operators that TVM rejects or computes wrongly in float16, and the error.
_IN_FLOAT16 = {
    "acos": _REFUSES,
    "acosh": _REFUSES,
    "asin": _REFUSES,
    "asinh": _REFUSES,
    "atan": _REFUSES,
    "atanh": _CANCELS,
    "cosh": _REFUSES,
    "sinh": _REFUSES,
    "tanh": _CANCELS,
    "nn.gelu": _ROUNDS,
    "nn.gelu_tanh": _ROUNDS,
    "nn.selu": _CANCELS,
    "nn.softplus": "overflows in float16: returns infinity for the argument 12",
}


def _register(op_name: str, corrects: str) -> None:
    op, of_tvm = Op.get(op_name), stock(op_name)

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """Compute float16 in float32, and bfloat16 on a GPU, which has no such functions of it."""
        (x,) = call.args
        dtype = dtype_of(x.ty)
        if dtype != "float16" and not (dtype == "bfloat16" and on_gpu()):
            return of_tvm(bb, call)
        wide = relax.Call(op, [relax.op.astype(x, "float32")], call.attrs)
        return relax.op.astype(wide, dtype)

    register_legalize(op_name, corrects=corrects)(legalize)


for _name, _wrong in _IN_FLOAT16.items():
    _register(f"relax.{_name}", _wrong)


@register_legalize("relax.wrap_param")
def _wrap_param(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return relax.op.astype(call.args[0], call.attrs.dtype)
