"""Elementwise functions of float32 without calls of the C library.

They are tensor expressions: they fuse with their neighbours, and are scheduled with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt

from tvm import te, tirx, topi

from . import _math as math


def elementwise(name: str, shape: Sequence[tirx.PrimExpr]) -> tirx.PrimFunc:
    """Return a function of one tensor.

    Parameters
    ----------
    name : str
        One of :data:`FUNCTIONS`.
    shape : Sequence[tirx.PrimExpr]
        The shape, in which what is not a number is a variable.
    """
    x = te.placeholder(shape, "float32", name="x")
    y = te.compute(
        shape,
        lambda *i: math.expression(FUNCTIONS[name], x(*i)),
        name=f"T_{name}",
        tag=topi.tag.ELEMWISE,
    )
    return te.create_prim_func([x, y])


def _gelu(x, bind: Callable):
    # x times the probability of what is below x.
    tail = math.normal_tail(x, bind)
    return x * tirx.Select(x < _f(0.0), tail, _f(1.0) - tail)


def _gelu_tanh(x, bind: Callable):
    inner = bind(_f(sqrt(2 / pi)) * x * (_f(1.0) + _f(0.044715) * x * x))
    return _f(0.5) * x * (_f(1.0) + math.tanh(inner, bind))


def _silu(x, bind: Callable):
    return x * math.sigmoid(x, bind)


def _f(value: float) -> tirx.FloatImm:
    return tirx.const(value, "float32")


#: The functions by name.
FUNCTIONS = {
    "exp": math.exp,
    "erf": math.erf,
    "tanh": math.tanh,
    "sigmoid": math.sigmoid,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
