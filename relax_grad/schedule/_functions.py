"""Functions of float32 as arithmetic, of which LLVM makes vectors; those of the C library take one number."""

from __future__ import annotations

import tvm_ffi
from tvm.ir import Call, Op

from ..kernel import _math

_FUNCTIONS = {
    "tirx.exp": _math.exp,
    "tirx.sigmoid": _math.sigmoid,
    "tirx.tanh": _math.tanh,
    "tirx.erf": _math.erf,
}


def as_arithmetic(expr):
    """Return an expression without the exp, sigmoid, tanh and erf of float32."""

    def call(node: Call):
        function = _FUNCTIONS.get(node.op.name) if isinstance(node.op, Op) else None
        if function is None or str(node.ty.dtype) != "float32":
            return node
        return _math.expression(function, node.args[0])

    return tvm_ffi.structural_map(expr, (Call, call))


def is_arithmetic(call: Call) -> bool:
    """Tell whether :func:`as_arithmetic` replaces a call."""
    is_known = isinstance(call.op, Op) and call.op.name in _FUNCTIONS
    return is_known and str(call.ty.dtype) == "float32"
