"""Conditions on the symbolic extents of a function, which a caller checks before a call.

Some computations have no value for every extent: a variance with Bessel's correction has none for a
batch of one row. A function keeps such conditions as an attribute.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

#: The attribute of a function with its conditions, as JSON.
_ATTRIBUTE = "relax_grad.extent_checks"

_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "max": max,
    "min": min,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_NAMES = {
    tirx.Add: "+",
    tirx.Sub: "-",
    tirx.Mul: "*",
    tirx.FloorDiv: "//",
    tirx.FloorMod: "%",
    tirx.Max: "max",
    tirx.Min: "min",
    tirx.EQ: "==",
    tirx.NE: "!=",
    tirx.LT: "<",
    tirx.LE: "<=",
    tirx.GT: ">",
    tirx.GE: ">=",
}


@dataclass(frozen=True)
class ExtentCheck:
    """A condition on symbolic extents.

    Attributes
    ----------
    condition : tuple[int or str, ...]
        The condition in postfix notation: numbers, names of extents, and operators.
    reason : str
        The reason for the condition, for errors.
    """

    condition: tuple[int | str, ...]
    reason: str

    @property
    def names(self) -> list[str]:
        """The names of the extents, each once."""
        names = (part for part in self.condition if isinstance(part, str))
        return list(dict.fromkeys(name for name in names if name not in _OPERATORS))

    def check(self, symbols: Mapping[str, int]) -> None:
        """Raise ValueError if extents do not fulfil the condition.

        Parameters
        ----------
        symbols : Mapping[str, int]
            The symbolic extents by their names. The condition holds if one is not known.
        """
        names = self.names
        if not all(name in symbols for name in names):
            return
        stack: list[int] = []
        for part in self.condition:
            if isinstance(part, int):
                stack.append(part)
            elif part in _OPERATORS:
                second, first = stack.pop(), stack.pop()
                stack.append(_OPERATORS[part](first, second))
            else:
                stack.append(symbols[part])
        if not stack.pop():
            extents = " and ".join(f"{name} = {symbols[name]}" for name in names)
            raise ValueError(f"{self.reason}, but the inputs have {extents}")


def condition_of(expr: tirx.Expr) -> tuple[int | str, ...] | None:
    """Return a condition on extents in postfix notation; None if it has other operators."""
    if isinstance(expr, tirx.IntImm):
        return (int(expr),)
    if isinstance(expr, tirx.Var):
        return (expr.name,)
    name = _NAMES.get(type(expr))
    if name is None:
        return None
    first, second = condition_of(expr.a), condition_of(expr.b)
    return None if first is None or second is None else (*first, *second, name)


def with_extent_checks(function: relax.Function, checks: Sequence[ExtentCheck]) -> relax.Function:
    """Return a function with the attribute of conditions, each once."""
    described = [[list(check.condition), check.reason] for check in dict.fromkeys(checks)]
    return function.with_attr(_ATTRIBUTE, json.dumps(described)) if described else function


def extent_checks(module: tvm.IRModule, name: str) -> tuple[ExtentCheck, ...]:
    """Return the conditions of a function of a module."""
    return checks_of(module[name])


def checks_of(function: relax.Function) -> tuple[ExtentCheck, ...]:
    """Return the conditions of a function."""
    attributes = function.attrs
    text = attributes.get(_ATTRIBUTE) if attributes else None
    described = json.loads(str(text)) if text else []
    return tuple(ExtentCheck(tuple(condition), reason) for condition, reason in described)
