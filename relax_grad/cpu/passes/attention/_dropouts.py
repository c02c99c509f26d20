"""The recognition of dropout whose mask the counter-based generator draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import tvm
from tvm import relax
from tvm.ir import Op

from ....ir.module import DRAWN, FIRST_ELEMENTS
from ._shapes import are_equal_shapes, extents_of, number_of

_CALL_TIR, _RESHAPE = Op.get("relax.call_tir"), Op.get("relax.reshape")
_WHERE, _MULTIPLY = Op.get("relax.where"), Op.get("relax.multiply")

#: The largest relative difference of the factor of kept elements from one over their share.
_ROUNDING = 1e-6


class Dropout(NamedTuple):
    """The dropout of a tensor.

    Attributes
    ----------
    data : relax.Expr
        The tensor before the dropout.
    seed, stream : relax.Expr
        The key and the stream of the generator.
    rate : float
        The probability of 0.
    """

    data: relax.Expr
    seed: relax.Expr
    stream: relax.Expr
    rate: float


def dropout_of(
    call: relax.Call | None,
    values: Mapping[relax.Var, relax.Expr],
    used_once: Callable[[relax.Expr], relax.Call | None],
    mod: tvm.IRModule,
) -> Dropout | None:
    """Return the dropout that a call is the last step of: ``where(mask, data * factor, 0)``.

    Parameters
    ----------
    call : relax.Call or None
        The call.
    values : Mapping[relax.Var, relax.Expr]
        The values that variables are bound to.
    used_once : Callable
        Returns the call that a variable with a single use is bound to, or None.
    mod : tvm.IRModule
        The module, which has the functions of the generator.
    """
    if call is None or call.op != _WHERE or number_of(call.args[2]) != 0.0:
        return None
    mask, scaled = call.args[0], used_once(call.args[1])
    drawn = _drawn(mask, values, mod)
    if scaled is None or scaled.op != _MULTIPLY or drawn is None:
        return None
    factors = [number_of(operand) for operand in scaled.args]
    if factors.count(None) != 1:
        return None
    data = scaled.args[factors.index(None)]
    threshold, seed, stream = drawn
    if not threshold or not _have_equal_shapes(mask, call, data):
        return None
    share = threshold * 2.0**-32
    factor = next(number for number in factors if number is not None)
    if abs(factor * share - 1.0) > _ROUNDING:
        return None
    return Dropout(data, seed, stream, 1.0 - share)


def _drawn(
    mask: relax.Expr, values: Mapping[relax.Var, relax.Expr], mod: tvm.IRModule
) -> tuple[int, relax.Expr, relax.Expr] | None:
    """Return the threshold, the seed and the stream of a mask; None if it has another source."""
    while isinstance(mask, relax.Var):
        call = values.get(mask)
        if not isinstance(call, relax.Call):
            return None
        if call.op == _RESHAPE:
            mask = call.args[0]
            continue
        if call.op != _CALL_TIR:
            return None
        attrs, arguments = mod[call.args[0]].attrs, call.args[1].fields
        if attrs is not None and FIRST_ELEMENTS in attrs:
            mask = arguments[0]
            continue
        kind, _, threshold = str(attrs[DRAWN] if attrs and DRAWN in attrs else "").partition(" ")
        return (int(threshold), *arguments) if kind == "below" else None
    return None


def _have_equal_shapes(*exprs: relax.Expr) -> bool:
    first, *others = map(extents_of, exprs)
    return all(are_equal_shapes(first, other) for other in others)
