"""The values of integers that a graph computes from extents: numbers and expressions of symbolic
extents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from ....ir.compat import Analyzer
from ....ir.expressions import are_equal, variables

#: The largest denominator of a factor of an extent.
LARGEST_DENOMINATOR = 1 << 10

#: The strength of proofs that use the bounds of symbols, ``ProofStrength.SYMBOLIC_BOUND``.
_SYMBOLIC_BOUND = 1

#: The largest power of an extent.
_LARGEST_POWER = 4

#: A symbolic extent is at least 1 and less than this.
_LIMIT = 1 << 31


class Ratio(NamedTuple):
    """A floating-point number that an extent gives: an expression divided by a positive number."""

    numerator: tirx.Expr | int
    denominator: int


#: An element of a tensor: a number, or an expression of symbolic extents.
Element: TypeAlias = "tirx.Expr | int | Ratio"


class Known(NamedTuple):
    """A tensor whose elements are known before the run.

    Attributes
    ----------
    elements : np.ndarray
        Of objects: an int, a bool, an expression of symbolic extents, or a Ratio in a
        floating-point tensor.
    dtype : str
        The dtype.
    """

    elements: np.ndarray
    dtype: str

    @property
    def is_symbolic(self) -> bool:
        """Whether an element depends on a symbolic extent."""
        return any(map(is_symbolic, self.elements.flat))


class Unknown(Exception):
    """An element is not known before the run."""


def is_symbolic(element: object) -> bool:
    """Tell whether a number depends on a symbolic extent."""
    if isinstance(element, Ratio):
        return is_symbolic(element.numerator)
    return not isinstance(element, (int, np.integer, np.bool_))


def plain(extent: tirx.Expr | int) -> tirx.Expr | int:
    """Return an extent as a number if it is one."""
    return int(extent) if isinstance(extent, (int, np.integer, tirx.IntImm)) else extent


def objects(values: Iterable, shape: Sequence[int] | None = None) -> np.ndarray:
    """Return an array of objects."""
    values = list(values)
    array: np.ndarray = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array if shape is None else array.reshape(shape)


class Extents:
    """Arithmetic of extents, which are positive.

    Parameters
    ----------
    least : Mapping[str, int], optional
        The smallest values of symbols by their names, where they are larger than 1.
    """

    def __init__(self, least: Mapping[str, int] | None = None) -> None:
        self._analyzer = Analyzer()
        self._given = dict(least or {})
        self._least: dict[tirx.Var, int] = {}

    @property
    def bounds(self) -> dict[str, int]:
        """The smallest values of symbols by their names, where they are larger than 1."""
        return {variable.name: value for variable, value in self._least.items() if value > 1}

    def _bind(self, *values: tirx.Expr) -> None:
        for value in values:
            if not is_symbolic(value):
                continue
            for variable in variables(value) - self._least.keys():
                self._set_least(variable, self._given.get(variable.name, 1))

    def _set_least(self, variable: tirx.Var, least: int) -> None:
        self._least[variable] = least
        low, count = (tirx.IntImm("int64", number) for number in (least, _LIMIT - least))
        self._analyzer.bind(variable, tvm.ir.Range.from_min_extent(low, count), True)

    def learn(self, extent: Element, least: int) -> None:
        """Take an expression of one symbolic extent to be at least a number, as for a tensor:
        the extent is large enough."""
        value = plain(extent)
        while is_symbolic(value) and not isinstance(value, (tirx.Var, Ratio)):
            other = plain(getattr(value, "b", value))
            if is_symbolic(other) or not -_LIMIT < least < _LIMIT:
                return
            if isinstance(value, tirx.Add):
                least -= other
            elif isinstance(value, tirx.Sub):
                least += other
            elif isinstance(value, tirx.FloorDiv) and other > 0:
                least *= other
            elif isinstance(value, tirx.Mul) and other > 0:
                least = -(-least // other)
            else:
                return
            value = plain(value.a)
        if isinstance(value, tirx.Var) and 1 < least < _LIMIT:
            self._bind(value)
            if self._least[value] < least:
                self._set_least(value, least)

    def refreshed(self, value: Element) -> Element:
        """Return a number whose bounds, such as ``max(n - 1, 0)``, are simplified by what was
        learnt since."""
        if isinstance(value, Ratio):
            return self.ratio(self.refreshed(value.numerator), value.denominator)
        if not is_symbolic(value) or not _has_bounds(value):
            return value
        number, factors = self._factors([value])
        return self.product(
            [
                number,
                *(self.simplified(factor) if _has_bounds(factor) else factor for factor in factors),
            ]
        )

    def simplified(self, value: tirx.Expr | int) -> tirx.Expr | int:
        """Return an expression in its simplest form, as a number if it is one."""
        if not is_symbolic(value):
            return int(value)
        self._bind(value)
        return plain(self._analyzer.simplify(value))

    def proves(self, condition: tirx.Expr | bool) -> bool:
        """Tell whether a condition holds for all extents."""
        if isinstance(condition, (bool, np.bool_)):
            return bool(condition)
        self._bind(condition)
        return bool(self._analyzer.can_prove(condition, _SYMBOLIC_BOUND))

    def equal(self, value: Element, other: Element) -> bool:
        """Tell whether two numbers are equal for all extents."""
        if not is_symbolic(value) and not is_symbolic(other):
            return value == other
        if is_symbolic(value) and is_symbolic(other) and are_equal(value, other):
            return True
        self._bind(value, other)
        return bool(self._analyzer.can_prove_equal(_expression(value), _expression(other)))

    def differ(self, value: Element, other: Element) -> bool:
        """Tell whether two numbers are different for all extents."""
        return self.proves(tirx.NE(_expression(value), _expression(other)))

    def product(self, values: Iterable) -> Element:
        """Return a product, whose factors stay as they are."""
        number, factors = self._factors(values)
        return _product(number, factors)

    def quotient(self, dividend: Iterable, divisor: Iterable) -> Element:
        """Return the quotient of two products of numbers, rounded down, without the
        factors that both have."""
        number, factors = self._factors(dividend)
        other, rest = self._factors(divisor)
        kept = []
        for term in rest:
            same = next((i for i, factor in enumerate(factors) if self.equal(factor, term)), None)
            if same is None:
                kept.append(term)
            else:
                del factors[same]
        common = math.gcd(number, other)
        if common > 1:
            number, other = number // common, other // common
        if other == 1 and not kept:
            return _product(number, factors)
        return self.simplified(
            tirx.floordiv(
                _expression(_product(number, factors)), _expression(_product(other, kept))
            )
        )

    def _factors(self, values: Iterable) -> tuple[int, list]:
        number, factors, waiting = 1, [], list(values)
        while waiting:
            factor = plain(waiting.pop(0))
            if isinstance(factor, int):
                number *= factor
            elif isinstance(factor, tirx.Mul):
                waiting[:0] = [factor.a, factor.b]
            else:
                factors.append(factor)
        return number, factors

    # Elements of tensors

    def add(self, a: Element, b: Element) -> Element:
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            (x, p), (y, q) = _ratio(a), _ratio(b)
            return self.ratio(self.add(self.product([x, q]), self.product([y, p])), p * q)
        return self.simplified(a + b)

    def subtract(self, a: Element, b: Element) -> Element:
        return self.add(a, self.multiply(b, -1))

    def multiply(self, a: Element, b: Element) -> Element:
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            (x, p), (y, q) = _ratio(a), _ratio(b)
            return self.ratio(self.product([x, y]), p * q)
        return self.product([a, b])

    def divide(self, a: Element, b: Element) -> Element:
        """Return the quotient of integers, rounded towards zero, or of other numbers."""
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            (x, p), (y, q) = _ratio(a), _ratio(b)
            if is_symbolic(y) or y <= 0:
                raise Unknown
            return self.ratio(self.product([x, q]), p * y)
        if not is_symbolic(a) and not is_symbolic(b):
            if b == 0:
                raise Unknown
            return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        if not self.proves(b > 0):
            raise Unknown
        if not self.proves(a >= 0):
            if not self.proves(a + b > 0):
                raise Unknown
            a = self.largest(a, 0)  # the quotient of a small negative number is 0
        return self.quotient([a], [b])

    def power(self, a: Element, b: Element) -> Element:
        """Return a whole power of a number."""
        if isinstance(b, Ratio) and b.denominator == 1:
            b = b.numerator
        if is_symbolic(b) or isinstance(b, Ratio) or not 0 <= b <= _LARGEST_POWER:
            raise Unknown
        result = Ratio(1, 1) if isinstance(a, Ratio) else 1
        for _ in range(int(b)):
            result = self.multiply(result, a)
        return result

    def modulo(self, a: Element, b: Element) -> Element:
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            raise Unknown
        if not is_symbolic(a) and not is_symbolic(b) and b:
            return a % b
        if not self.proves(b > 0):
            raise Unknown
        return self.simplified(tirx.floormod(_expression(a), _expression(b)))

    def ratio(self, numerator: tirx.Expr | int, denominator: int) -> Ratio:
        numerator = plain(numerator)
        if not is_symbolic(numerator):
            common = math.gcd(numerator, denominator) or 1
            return Ratio(numerator // common, denominator // common)
        return Ratio(numerator, denominator)

    def rounded(self, value: Element, up: bool = False) -> Element:
        """Return a number rounded down or up to an integer."""
        if not isinstance(value, Ratio):
            return value
        over = value.denominator - 1 if up else 0
        number = value.numerator
        if value.denominator == 1:
            return number
        if not is_symbolic(number):
            return (number + over) // value.denominator
        return self.quotient([self.add(number, over)], [value.denominator])

    def least(self, a: Element, b: Element) -> Element:
        return self._choice(tirx.min, min, a, b, a, more=b)

    def largest(self, a: Element, b: Element) -> Element:
        return self._choice(tirx.max, max, a, b, b, more=a)

    def _choice(
        self,
        function: Callable,
        plainly: Callable,
        a: Element,
        b: Element,
        less: Any,
        more: Any,
    ) -> Element:
        if isinstance(a, Ratio) or isinstance(b, Ratio):
            raise Unknown
        if not is_symbolic(a) and not is_symbolic(b):
            return plainly(a, b)
        if self.proves(less <= more):
            return a
        if self.proves(less >= more):
            return b
        return self.simplified(function(_expression(a), _expression(b)))

    def compare(self, kind: str) -> Callable:
        """Return a function of two numbers that tells whether a relation holds; it must hold, or
        not, for all extents."""
        relation, opposite = _RELATIONS[kind]

        def holds(a: Element, b: Element) -> bool:
            if isinstance(a, Ratio) or isinstance(b, Ratio):
                (x, p), (y, q) = _ratio(a), _ratio(b)
                a, b = self.product([x, q]), self.product([y, p])
            if not is_symbolic(a) and not is_symbolic(b):
                return bool(relation(a, b))
            if kind == "Equal" and self.equal(a, b):
                return True
            if kind != "Equal" and self.proves(relation(a, b)):
                return True
            if self.proves(opposite(a, b)):
                return False
            raise Unknown

        return holds


def _has_bounds(value: tirx.Expr) -> bool:
    """Tell whether an expression has a minimum or a maximum."""
    bounds: list[tirx.Expr] = []
    tvm_ffi.structural_walk(value, ((tirx.Min, tirx.Max), bounds.append))
    return bool(bounds)


def _ratio(value: Element) -> tuple:
    return value if isinstance(value, Ratio) else (value, 1)


def _expression(value: Any) -> tirx.Expr:
    return value if is_symbolic(value) else tirx.IntImm("int64", int(value))


def _product(number: int, factors: list) -> Element:
    result = None
    for factor in factors:
        result = factor if result is None else result * factor
    if result is None or number == 0:
        return number
    return result if number == 1 else result * tirx.IntImm("int64", number)


_RELATIONS = {
    "Equal": (lambda a, b: a == b, lambda a, b: tirx.NE(_expression(a), _expression(b))),
    "Greater": (lambda a, b: a > b, lambda a, b: a <= b),
    "GreaterOrEqual": (lambda a, b: a >= b, lambda a, b: a < b),
    "Less": (lambda a, b: a < b, lambda a, b: a >= b),
    "LessOrEqual": (lambda a, b: a <= b, lambda a, b: a > b),
}
