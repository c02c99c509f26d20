"""Functions of float32 as arithmetic, of which LLVM makes vectors; those of the C library take one number."""

from __future__ import annotations

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from ..kernel import _math
from ._fuse import weigh
from ._identities import FUNCTIONS, arguments_of, name_of, with_functions

_FUNCTIONS = {
    **FUNCTIONS,
    "tirx.atanh": _math.atanh,
    "tirx.exp": _math.exp,
    "tirx.sigmoid": _math.sigmoid,
    "tirx.tanh": _math.tanh,
    "tirx.erf": _math.erf,
}

#: Those of so many steps that TVM would take very long for one expression of them all.
_LONG = {"tirx.log": _math.log, "tirx.pow": _math.power}

#: Powers that are products.
_PRODUCTS = {2.0: lambda x, _: x * x, 3.0: lambda x, _: x * x * x}


def as_arithmetic(expr):
    """Return an expression without those functions of float32; some are computed by statements before it.

    A function of a function is computed from memory: TVM writes out in full what a name stands for, and where
    each function reads the one before it many times, three of them take it half a minute. No statement can
    be written for what is under a condition, or uses names that only the expression knows: there, functions
    beyond the second, and the long ones, remain those of the C library.
    """
    has_statements = not _names_in(expr) and not weigh(expr)[2]
    expr = with_functions(expr, lambda x: has_statements or not any(map(is_arithmetic, _calls(x))))

    def call(node: Call):
        if _is_one_of(node, _LONG) and _is_small_power(node):
            return _math.expression(_PRODUCTS[node.args[1].value], node.args[0])
        if _is_one_of(node, _LONG) and has_statements:
            return _LONG[node.op.name](*map(kept, node.args), kept)
        if not _is_one_of(node, _FUNCTIONS):
            return node
        arguments = arguments_of(node)
        if has_statements:
            arguments = [kept(each) if has_functions(each) else each for each in arguments]
        elif any(_names_in(name.value) for each in arguments for name in _names_in(each)):
            return node
        return _math.expression(_FUNCTIONS[name_of(node)], *arguments)

    return tvm_ffi.structural_map(expr, (Call, call))


def has_functions(value) -> bool:
    """Tell whether an expression is made of functions as arithmetic."""
    return bool(_names_in(value))


def _calls(expr) -> list[Call]:
    calls = []
    tvm_ffi.structural_walk(expr, (Call, calls.append))
    return calls


def _names_in(expr) -> list[tirx.Let]:
    names = []
    tvm_ffi.structural_walk(expr, (tirx.Let, names.append))
    return names


def kept(value):
    """Emit a statement that computes a value, and return what reads it: TVM does not look through memory."""
    buffer = T.alloc_buffer([1], str(value.ty.dtype), layout=None)
    T.buffer_store(buffer, value, [0])
    return buffer[0]


def _is_small_power(call: Call) -> bool:
    exponent = call.args[-1]
    return (
        len(call.args) == 2 and isinstance(exponent, tirx.FloatImm) and exponent.value in _PRODUCTS
    )


def _is_one_of(call: Call, functions: dict) -> bool:
    return name_of(call) in functions and str(call.ty.dtype) == "float32"


def is_arithmetic(call: Call) -> bool:
    """Tell whether :func:`as_arithmetic` replaces a call."""
    return _is_one_of(call, {**_FUNCTIONS, **_LONG})
