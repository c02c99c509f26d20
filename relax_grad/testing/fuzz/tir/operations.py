"""The operations of expressions, as TVM expressions and as computations in NumPy."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx


class Operation(NamedTuple):
    """An operation.

    Attributes
    ----------
    build : Callable
        Returns the expression, given TVM expressions, or Python integers for indices.
    compute : Callable
        Returns the value, given NumPy scalars or Python integers. That of :data:`CHOICE` is not
        called: only one of its branches is evaluated.
    """

    build: Callable
    compute: Callable


def _of_integers(function: Callable) -> Callable:
    """Return a function of expressions that also accepts two Python integers."""

    def build(x: Any, y: Any) -> tirx.PrimExpr:
        return function(tirx.const(x, "int32") if isinstance(x, int) else x, y)

    return build


def _object(comparison: Any) -> tirx.PrimExpr:
    """Return the expression of a comparison, which TVM may have deferred."""
    return comparison.asobject() if hasattr(comparison, "asobject") else comparison


def _equal(x: Any, y: Any) -> tirx.PrimExpr:
    return _object(x == y)


def _not_equal(x: Any, y: Any) -> tirx.PrimExpr:
    return _object(x != y)


def _through_float64(function: Callable) -> Callable:
    return lambda x: x.dtype.type(function(float(x)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


#: All operations except casts. A choice has no computation in NumPy: only its taken branch is
#: evaluated.
OPERATIONS = {
    "add": Operation(operator.add, operator.add),
    "subtract": Operation(operator.sub, operator.sub),
    "multiply": Operation(operator.mul, operator.mul),
    "floordiv": Operation(operator.floordiv, operator.floordiv),
    "floormod": Operation(operator.mod, operator.mod),
    "max": Operation(_of_integers(tirx.max), max),
    "min": Operation(_of_integers(tirx.min), min),
    "less": Operation(_of_integers(operator.lt), operator.lt),
    "less_equal": Operation(_of_integers(operator.le), operator.le),
    "equal": Operation(_of_integers(_equal), operator.eq),
    "not_equal": Operation(_of_integers(_not_equal), operator.ne),
    "and": Operation(tirx.And, lambda x, y: np.bool_(x and y)),
    "or": Operation(tirx.Or, lambda x, y: np.bool_(x or y)),
    "not": Operation(tirx.Not, np.logical_not),
    "exp": Operation(tirx.exp, _through_float64(math.exp)),
    "tanh": Operation(tirx.tanh, _through_float64(math.tanh)),
    "sigmoid": Operation(tirx.sigmoid, _through_float64(_sigmoid)),
    "select": Operation(tirx.Select, lambda c, x, y: x if c else y),
    "if_then_else": Operation(tirx.if_then_else, lambda c, x, y: x if c else y),
}

#: A choice that evaluates only the taken branch.
CHOICE = "if_then_else"

CAST = "cast"
