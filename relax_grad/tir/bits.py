"""Values that are computed from the bits of numbers, whose derivative is unknown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm import tirx
from tvm.ir import Call

from ..ir.compat import BufferLoad, loaded_buffer
from ..ir.expressions import loads
from .statements import Store, dtype_of, is_float, op_name

_COMPARISONS = (
    tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE, tirx.And, tirx.Or, tirx.Not,
)  # fmt: skip


def from_bits(stores: Sequence[Store], varied: Collection[tirx.Var]) -> list[Store]:
    """Return the stores of floating-point values that are computed from the bits of varied numbers.

    An integer has no derivative, so that a gradient ends where a number is rounded to one or
    compared. The bits of a number, however, hold all of it:
    ``reinterpret("float32", reinterpret("int32", x))`` is ``x``.

    Parameters
    ----------
    stores : Sequence[Store]
        All stores of a function, with bound variables replaced by their values.
    varied : Collection[tirx.Var]
        The buffers of floating-point numbers that depend on the arguments of the gradient.
    """
    holding: set[tirx.Var] = set()
    while True:
        storing = [store for store in stores if _has_bits(store.value, varied, holding)]
        more = {store.buffer for store in storing if not is_float(dtype_of(store.buffer))} - holding
        if not more:
            return [store for store in storing if is_float(dtype_of(store.buffer))]
        holding |= more


def _has_bits(
    expr: tirx.PrimExpr, varied: Collection[tirx.Var], holding: Collection[tirx.Var]
) -> bool:
    """Tell whether the value of an expression, not its conditions or indices, has the bits of
    varied numbers."""
    if isinstance(expr, BufferLoad):
        return loaded_buffer(expr) in holding
    if isinstance(expr, _COMPARISONS):
        return False
    if isinstance(expr, Call):
        name, arguments = (
            op_name(expr),
            [argument for argument in expr.args if isinstance(argument, tirx.Expr)],
        )
        if name == "reinterpret" and is_float(dtype_of(arguments[-1])):
            return not is_float(dtype_of(expr)) and any(
                loaded_buffer(load) in varied for load in loads(arguments[-1])
            )
        operands = arguments[1:] if name == "if_then_else" else arguments
    else:
        names = ("a", "b", "true_value", "false_value", "value", "body")
        operands = [getattr(expr, name, None) for name in names]
    return any(
        _has_bits(operand, varied, holding)
        for operand in operands
        if isinstance(operand, tirx.Expr)
    )
