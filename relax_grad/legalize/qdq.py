"""Legalization of quantization operators for which TVM's is wrong."""

from __future__ import annotations

from tvm import relax

from ..ir.compat import dtype_of
from ..registry import register_legalize
from ._util import stock

_STOCK_DEQUANTIZE = stock("relax.dequantize")


@register_legalize("relax.dequantize", corrects="truncates float8 to integers")
def _dequantize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, scale, zero_point = call.args
    if not dtype_of(data.ty).startswith("float8"):
        return _STOCK_DEQUANTIZE(bb, call)
    wide = relax.op.astype(data, "float32")
    return relax.Call(call.op, [wide, scale, zero_point], call.attrs)
