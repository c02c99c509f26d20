"""The arguments that the checks share: a function, its inputs to differentiate, and tolerances."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence

from tvm import relax
from tvm.ir import Op

from .._validation import alternatives, described
from ._program import Argument


def resolve(fn_or_op: str | Callable) -> tuple[str, Callable]:
    """Return the name and the builder of an operator or a function."""
    if callable(fn_or_op) and not isinstance(fn_or_op, relax.Var):
        return getattr(fn_or_op, "__name__", repr(fn_or_op)), fn_or_op
    if not isinstance(fn_or_op, str):
        raise TypeError(
            "expected the name of an operator or a function of Relax, but got "
            f"{described(fn_or_op)}"
        )
    builder = relax.op
    for part in fn_or_op.removeprefix("relax.").split("."):
        builder = getattr(builder, part, None)
        if builder is None:
            return fn_or_op, _builder_of(fn_or_op)
    return fn_or_op, builder


def _builder_of(name: str) -> Callable:
    """Return a builder of an operator that has none in tvm.relax.op, such as one of the user's."""
    names = Op.list_op_names()
    if name not in names:
        known = [op for op in names if op.startswith("relax.")]
        raise ValueError(
            f"TVM has no operator named {name!r}, and tvm.relax.op no builder; register one of "
            f"your own first, or give a function of Relax; {alternatives(_full(name), known)}"
        )

    for attribute, remedy in _NEEDED.items():
        if Op.get(name).get_attr(attribute) is None:
            raise ValueError(
                f"the operator {name} has no {attribute}; register it: "
                f'tvm.ir.register_op_attr("{name}", "{attribute}", {remedy})'
            )

    def call(*args: relax.Expr, **attrs: object) -> relax.Call:
        if attrs:
            raise TypeError(
                f"{name} has no builder in tvm.relax.op that takes {', '.join(attrs)}; check a "
                "function that makes the call: check_gradients(lambda x: swish(x, beta=2.0), [x])"
            )
        return relax.Call(Op.get(name), list(args))

    return call


#: The attributes of an operator that its check needs, and examples of their values.
_NEEDED = {
    "FInferType": "lambda call, bb: call.args[0].ty",
    "FPurity": "True",
    "FLegalize": "lambda bb, call: bb.call_te(expression, *call.args)",
}


def _full(name: str) -> str:
    return name if name.startswith("relax.") else f"relax.{name}"


def check_tolerance(name: str, tolerance: float) -> None:
    """Refuse a tolerance that is not a number or is negative."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, numbers.Real):
        raise TypeError(f"{name} must be a number, but it is {tolerance!r}")
    if not tolerance >= 0:
        raise ValueError(f"{name} must not be negative, but it is {tolerance!r}")


def select_wrt(arguments: Sequence[Argument], wrt: Sequence[int | str] | None) -> list[str]:
    """Return the names of the inputs to differentiate with respect to.

    Raises
    ------
    ValueError
        If a named input does not exist or is not a floating-point tensor, or if no input is
        selected.
    """
    inputs = [a for a in arguments if not a.name.startswith("cotangent")]
    floats = [a.name for a in inputs if a.is_float]
    if wrt is None:
        selected = floats
    else:
        items = [wrt] if isinstance(wrt, (int, str)) else wrt
        selected = [item if isinstance(item, str) else f"x{item}" for item in items]
        selected = list(dict.fromkeys(selected))
    for name in selected:
        if name not in floats:
            raise ValueError(
                f"wrt names {name}, which is not a floating-point tensor; the inputs are "
                + ", ".join(f"{a.name}: {a.type}" for a in inputs)
            )
    if not selected:
        raise ValueError(
            "there is no floating-point input to differentiate with respect to; the inputs are "
            + ", ".join(f"{a.name}: {a.type}" for a in inputs)
        )
    return selected
