"""Derivatives of scalar expressions.

The derivative of an expression is a list of contributions: for each load (and each variable) of a
floating-point number, the condition under which the expression reads it, and the cotangent times
the partial derivative. A contribution is computed only under its condition. Therefore a branch that
is not taken contributes nothing, even where its derivative is infinite.

Half precision is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Call

from ..errors import GradientError
from ..ir.compat import BufferLoad, StringImm, loaded_buffer
from ..ir.dtypes import accumulation_dtype
from .statements import cast, dtype_of, is_float, negated, op_name

#: Functions whose derivative is 0 wherever it exists.
_STEPS = ("floor", "ceil", "round", "trunc", "nearbyint")


@dataclass(frozen=True)
class Contribution:
    """The cotangent of a load or a variable.

    Attributes
    ----------
    source : tirx.PrimExpr
        The load or the variable.
    guards : tuple[tirx.PrimExpr, ...]
        The conditions under which it is read; each may be evaluated only if those before it hold.
    value : tirx.PrimExpr
        Its cotangent, in float32 at least.
    """

    source: tirx.PrimExpr
    guards: tuple[tirx.PrimExpr, ...]
    value: tirx.PrimExpr


def widened(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an expression in the dtype that its numbers are accumulated in."""
    return cast(expr, accumulation_dtype(dtype_of(expr)))


def derivative(
    value: tirx.PrimExpr, cotangent: tirx.PrimExpr, sources: Collection[tirx.Var]
) -> list[Contribution]:
    """Return the contributions of an expression to the cotangents of its loads and variables.

    Parameters
    ----------
    value : tirx.PrimExpr
        The expression.
    cotangent : tirx.PrimExpr
        The cotangent of its value.
    sources : Collection[tirx.Var]
        The buffers and variables that have a gradient. All others are constants.

    Raises
    ------
    GradientError
        If a function in the expression has no derivative; the error names it.
    """
    walker = _Walker(sources)
    walker.visit(value, widened(cotangent), ())
    return walker.contributions


class _Walker:
    def __init__(self, sources: Collection[tirx.Var]):
        self.contributions: list[Contribution] = []
        self._sources = sources
        self._known: dict[int, bool] = {}
        self._kept: list[tirx.PrimExpr] = []

    def _is_active(self, expr: tirx.PrimExpr) -> bool:
        """Tell whether an expression depends on a source, other than by an index or a condition."""
        if not isinstance(expr, tirx.Expr) or isinstance(expr, StringImm):
            return False  # the name of an external function
        if not is_float(dtype_of(expr)):
            return False
        if isinstance(expr, BufferLoad):
            return loaded_buffer(expr) in self._sources
        if isinstance(expr, tirx.Var):
            return expr in self._sources
        known = self._known.get(expr.__chandle__())
        if known is None:
            known = any(map(self._is_active, _operands(expr)))
            self._known[expr.__chandle__()] = known
            self._kept.append(expr)  # its address is not used again
        return known

    def visit(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        """Add the contributions of an expression, given its cotangent in its accumulation dtype."""
        if not self._is_active(expr):
            return
        if isinstance(expr, (BufferLoad, tirx.Var)):
            self.contributions.append(Contribution(expr, guards, cotangent))
        elif isinstance(expr, Call):
            self._call(expr, cotangent, guards)
        else:
            kind = type(expr).__name__
            if kind not in _RULES:
                raise GradientError(f"{kind} has no derivative, in {expr}")
            _RULES[kind](self, expr, cotangent, guards)

    def _add(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        self.visit(expr.a, cotangent, guards)
        self.visit(expr.b, cotangent, guards)

    def _sub(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        self.visit(expr.a, cotangent, guards)
        self.visit(expr.b, -cotangent, guards)

    def _mul(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        self.visit(expr.a, cotangent * widened(expr.b), guards)
        self.visit(expr.b, cotangent * widened(expr.a), guards)

    def _div(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        b = widened(expr.b)
        self.visit(expr.a, cotangent / b, guards)
        self.visit(expr.b, -cotangent * (widened(expr.a) / b) / b, guards)

    def _mod(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        self.visit(expr.a, cotangent, guards)
        self.visit(expr.b, -cotangent * tirx.trunc(widened(expr.a) / widened(expr.b)), guards)

    def _max(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        self._extremum(expr, cotangent, guards, tirx.LT, tirx.GE)

    def _min(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        self._extremum(expr, cotangent, guards, tirx.GT, tirx.LE)

    def _extremum(
        self,
        expr: tirx.PrimExpr,
        cotangent: tirx.PrimExpr,
        guards: tuple,
        loses: Callable,
        reaches: Callable,
    ) -> None:
        """Visit both arguments, given comparisons: the first is not the extremum, or it is.

        As for the operators, NaN passes the gradient to both of two differentiated arguments, and
        through a relu, but not through a bound.
        """
        a, b = expr.a, expr.b
        for own, other in ((a, b), (b, a)):
            if not self._is_active(own):
                continue
            if self._is_active(other):  # as for maximum: two equal arguments get half each
                tie = tirx.Select(own == other, cotangent * _half(cotangent), cotangent)
                self.visit(own, tirx.Select(loses(own, other), _zero(cotangent), tie), guards)
            elif _is_relu(expr, own, other):
                self.visit(own, tirx.Select(own <= other, _zero(cotangent), cotangent), guards)
            else:  # as for clip: a bound that is reached does not stop the gradient
                passed = tirx.Select(reaches(own, other), cotangent, _zero(cotangent))
                self.visit(own, passed, guards)

    def _select(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        self._branches(expr.condition, expr.true_value, expr.false_value, cotangent, guards)

    def _branches(
        self,
        condition: tirx.PrimExpr,
        true_value: tirx.PrimExpr,
        false_value: tirx.PrimExpr,
        cotangent: tirx.PrimExpr,
        guards: tuple,
    ) -> None:
        self.visit(true_value, cotangent, (*guards, condition))
        self.visit(false_value, cotangent, (*guards, negated(condition)))

    def _cast(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        inner = dtype_of(expr.value)
        if is_float(inner):
            self.visit(expr.value, cast(cotangent, accumulation_dtype(inner)), guards)

    def _vector(self, expr: tirx.PrimExpr, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        raise GradientError(f"a vector has no derivative, in {expr}")

    def _call(self, expr: Call, cotangent: tirx.PrimExpr, guards: tuple) -> None:
        name = op_name(expr)
        if name == "if_then_else":
            condition, true_value, false_value = expr.args
            self._branches(condition, true_value, false_value, cotangent, guards)
        elif name in _STEPS:
            return
        elif name == "fma":
            a, b, addend = expr.args
            self.visit(a, cotangent * widened(b), guards)
            self.visit(b, cotangent * widened(a), guards)
            self.visit(addend, cotangent, guards)
        elif name == "reinterpret" and not is_float(dtype_of(expr.args[-1])):
            return  # the bits of a number are refused before
        elif name in _UNARY:
            (x,) = expr.args
            wide_x = widened(x)
            self.visit(x, cotangent * _UNARY[name](wide_x), guards)
        elif name in _BINARY:
            a, b = expr.args
            wide_a, wide_b = widened(a), cast(widened(b), dtype_of(widened(a)))
            for argument, partial in zip((a, b), _BINARY[name], strict=True):
                if self._is_active(argument):
                    self.visit(argument, cotangent * partial(wide_a, wide_b), guards)
        else:
            raise GradientError(f"{name} has no derivative, in {expr}")


def _operands(expr: tirx.PrimExpr) -> list:
    """Return the operands of an expression."""
    if isinstance(expr, Call):
        return list(expr.args)
    names = ("a", "b", "true_value", "false_value", "value", "body")
    operands = [getattr(expr, name, None) for name in names]
    return [*operands, *getattr(expr, "vectors", ())]


#: The methods for expressions besides calls, loads and variables, by the names of their types.
_RULES: dict[str, Callable[[_Walker, tirx.PrimExpr, tirx.PrimExpr, tuple], None]] = {
    "Add": _Walker._add,
    "Broadcast": _Walker._vector,
    "Cast": _Walker._cast,
    "Div": _Walker._div,
    "Max": _Walker._max,
    "Min": _Walker._min,
    "Mod": _Walker._mod,
    "Mul": _Walker._mul,
    "Ramp": _Walker._vector,
    "Select": _Walker._select,
    "Shuffle": _Walker._vector,
    "Sub": _Walker._sub,
}


def _is_relu(expr: tirx.PrimExpr, own: tirx.PrimExpr, other: tirx.PrimExpr) -> bool:
    """Tell whether an expression is ``max(x, 0)`` of anything except another bound."""
    is_zero = isinstance(other, tirx.FloatImm) and float(other.value) == 0
    return isinstance(expr, tirx.Max) and is_zero and not isinstance(own, tirx.Min)


def _number(like: tirx.PrimExpr, value: float) -> tirx.PrimExpr:
    return tirx.const(value, dtype_of(like))


def _zero(like: tirx.PrimExpr) -> tirx.PrimExpr:
    return _number(like, 0.0)


def _half(like: tirx.PrimExpr) -> tirx.PrimExpr:
    return _number(like, 0.5)


def _sign(x: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.Select(
        x > _zero(x), _number(x, 1.0), tirx.Select(x < _zero(x), _number(x, -1.0), _zero(x))
    )


def _one_minus_square(x: tirx.PrimExpr) -> tirx.PrimExpr:
    return (_number(x, 1.0) - x) * (_number(x, 1.0) + x)


def _power_of_base(a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return ``b * a ** (b - 1)``, which is 0 for ``b = 0``."""
    slope = b * tirx.power(a, b - _number(b, 1.0))
    return tirx.Select(b == _zero(b), _zero(b), slope)


def _power_of_exponent(a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return ``a ** b * log(a)``, which is 0 for ``a = 0`` and ``b >= 0``."""
    is_zero = tirx.And(a == _zero(a), b >= _zero(b))
    return tirx.Select(is_zero, _zero(a), tirx.power(a, b) * tirx.log(a))


def _share(numerator: tirx.PrimExpr, a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return ``numerator / (a ** 2 + b ** 2)``, which is 0 at the origin."""
    square = a * a + b * b
    safe = tirx.Select(square == _zero(a), _number(a, 1.0), square)
    return tirx.Select(square == _zero(a), _zero(a), numerator / safe)


_LN2, _LN10 = math.log(2), math.log(10)

#: The derivatives of functions of one argument.
_UNARY: dict[str, Callable] = {
    "exp": tirx.exp,
    "exp2": lambda x: tirx.exp2(x) * _number(x, _LN2),
    "exp10": lambda x: tirx.exp10(x) * _number(x, _LN10),
    "log": lambda x: _number(x, 1.0) / x,
    "log2": lambda x: _number(x, 1 / _LN2) / x,
    "log10": lambda x: _number(x, 1 / _LN10) / x,
    "log1p": lambda x: _number(x, 1.0) / (_number(x, 1.0) + x),
    "sqrt": lambda x: _half(x) / tirx.sqrt(x),
    "rsqrt": lambda x: _number(x, -0.5) * tirx.rsqrt(x) / x,
    "sigmoid": lambda x: tirx.sigmoid(x) * (_number(x, 1.0) - tirx.sigmoid(x)),
    "tanh": lambda x: _one_minus_square(tirx.tanh(x)),
    "erf": lambda x: tirx.exp(-x * x) * _number(x, 2 / math.sqrt(math.pi)),
    "sin": tirx.cos,
    "cos": lambda x: -tirx.sin(x),
    "tan": lambda x: _number(x, 1.0) + tirx.tan(x) * tirx.tan(x),
    "asin": lambda x: _number(x, 1.0) / tirx.sqrt(_one_minus_square(x)),
    "acos": lambda x: _number(x, -1.0) / tirx.sqrt(_one_minus_square(x)),
    "atan": lambda x: _number(x, 1.0) / (_number(x, 1.0) + x * x),
    "sinh": tirx.cosh,
    "cosh": tirx.sinh,
    "asinh": lambda x: _number(x, 1.0) / tirx.sqrt(x * x + _number(x, 1.0)),
    "acosh": lambda x: (
        _number(x, 1.0) / (tirx.sqrt(x - _number(x, 1.0)) * tirx.sqrt(x + _number(x, 1.0)))
    ),
    "atanh": lambda x: _number(x, 1.0) / _one_minus_square(x),
    "fabs": _sign,
}

#: The derivatives of functions of two arguments, with respect to each.
_BINARY: dict[str, tuple[Callable, Callable]] = {
    "pow": (_power_of_base, _power_of_exponent),
    "atan2": (lambda a, b: _share(b, a, b), lambda a, b: -_share(a, a, b)),
    "hypot": (lambda a, b: a / tirx.hypot(a, b), lambda a, b: b / tirx.hypot(a, b)),
    "fmod": (lambda a, b: _number(a, 1.0), lambda a, b: -tirx.trunc(a / b)),
    "copysign": (lambda a, b: _sign(a) * tirx.copysign(_number(a, 1.0), b), lambda a, b: _zero(a)),
    "ldexp": (lambda a, b: tirx.exp2(b), lambda a, b: _zero(a)),
}
