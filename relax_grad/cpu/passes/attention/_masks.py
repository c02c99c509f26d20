"""The values of masks that are computed from constants alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np
from tvm import relax
from tvm.ir import Op

from ....ir.compat import constant_value, dtype_of
from ....ir.shapes import static_extents

#: The most elements of a mask whose value is computed.
_MOST_ELEMENTS = 2**24


def _shape(call: relax.Call) -> list[int] | None:
    extents = static_extents(call.ty)
    return None if extents is None or prod(extents) > _MOST_ELEMENTS else extents


def _triangle(function: Callable) -> Callable:
    return lambda call, _, x: function(x, int(call.args[1].value))


def _of(function: Callable) -> Callable:
    return lambda _call, _shape, *operands: function(*operands)


def _reshaped(_call: relax.Call, shape: list[int], x: np.ndarray) -> np.ndarray:
    return x.reshape(shape)


_BINARY = (
    *("add", "subtract", "multiply", "equal", "not_equal", "greater", "greater_equal", "less"),
    *("less_equal", "logical_and", "logical_or", "logical_xor"),
)

#: The values of operators from a call, its shape, and its tensors.
_VALUES: dict[str, Callable] = {
    **{name: _of(getattr(np, name)) for name in (*_BINARY, "logical_not", "where")},
    "bitwise_and": _of(np.bitwise_and),
    "bitwise_or": _of(np.bitwise_or),
    "bitwise_not": _of(np.bitwise_not),
    "arange": lambda call, _: np.arange(*(int(arg.value) for arg in call.args)),
    "astype": lambda call, _, x: x.astype(dtype_of(call.ty)),
    "broadcast_to": lambda _, shape, x: np.broadcast_to(x, shape),
    "expand_dims": _reshaped,
    "grad.stop_gradient": lambda _call, _shape, x: x,
    "full": lambda _, shape, x: np.full(shape, x),
    "ones": lambda call, shape: np.ones(shape, dtype_of(call.ty)),
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "tril": _triangle(np.tril),
    "triu": _triangle(np.triu),
    "zeros": lambda call, shape: np.zeros(shape, dtype_of(call.ty)),
}

_OPERATORS = {Op.get(f"relax.{name}"): function for name, function in _VALUES.items()}


def value_of(
    expr: relax.Expr, values: Mapping[relax.Var, relax.Expr], known: dict
) -> np.ndarray | None:
    """Return the value of an expression of constants, or None for any other one.

    Parameters
    ----------
    expr : relax.Expr
        The expression.
    values : Mapping[relax.Var, relax.Expr]
        The values that variables are bound to.
    known : dict
        The results for variables, which this function adds to.
    """
    if isinstance(expr, relax.Var):
        if expr not in known:
            known[expr] = None  # for a variable that refers to itself
            known[expr] = value_of(values[expr], values, known) if expr in values else None
        return known[expr]
    constant = constant_value(expr)
    if constant is not None:
        return constant
    if not isinstance(expr, relax.Call) or expr.op not in _OPERATORS:
        return None
    shape = _shape(expr)
    if shape is None:
        return None
    tensors = [arg for arg in expr.args if isinstance(arg.ty, relax.TensorType)]
    operands = [value_of(tensor, values, known) for tensor in tensors]
    if any(operand is None for operand in operands):
        return None
    with np.errstate(all="ignore"):
        return _OPERATORS[expr.op](expr, shape, *operands)
