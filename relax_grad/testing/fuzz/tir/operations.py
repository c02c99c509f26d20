"""The operations of expressions: how TVMScript writes them, and how NumPy computes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Operation(NamedTuple):
    """An operation: its TVMScript, and its value for NumPy scalars, or Python integers for indices."""

    text: str
    compute: Callable


def _through_float64(function: Callable) -> Callable:
    return lambda x: x.dtype.type(function(float(x)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


#: All but casts and the two choices, of which one is evaluated lazily.
OPERATIONS = {
    "add": Operation("({0} + {1})", lambda x, y: x + y),
    "subtract": Operation("({0} - {1})", lambda x, y: x - y),
    "multiply": Operation("({0} * {1})", lambda x, y: x * y),
    "floordiv": Operation("({0} // {1})", lambda x, y: x // y),
    "floormod": Operation("({0} % {1})", lambda x, y: x % y),
    "max": Operation("T.max({0}, {1})", max),
    "min": Operation("T.min({0}, {1})", min),
    "abs": Operation("T.abs({0})", abs),
    "less": Operation("({0} < {1})", lambda x, y: x < y),
    "less_equal": Operation("({0} <= {1})", lambda x, y: x <= y),
    "equal": Operation("({0} == {1})", lambda x, y: x == y),
    "not_equal": Operation("({0} != {1})", lambda x, y: x != y),
    "and": Operation("T.And({0}, {1})", lambda x, y: np.bool_(x and y)),
    "or": Operation("T.Or({0}, {1})", lambda x, y: np.bool_(x or y)),
    "not": Operation("T.Not({0})", lambda x: np.bool_(not x)),
    "exp": Operation("T.exp({0})", _through_float64(math.exp)),
    "tanh": Operation("T.tanh({0})", _through_float64(math.tanh)),
    "sigmoid": Operation("T.sigmoid({0})", _through_float64(_sigmoid)),
    "select": Operation("T.Select({0}, {1}, {2})", lambda c, x, y: x if c else y),
}

#: A choice that evaluates only the branch that it takes.
CHOICE = "if_then_else"

CAST = "cast"
