"""Identities between float32 expressions that suffer from cancellation and functions that do not.

``x * (0.5 + 0.5 * erf(x * 0.7071))`` is gelu, whether TVM's legalization, a gradient rule or a
model has written it. Evaluated as written, it has no correct digit where the sum is close to 0. An
identity holds for any x, so matching does not depend on operators: it only requires that all
occurrences of x in an expression are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import TypeAlias

from tvm import tirx
from tvm.ir import Call, Op

from ...ir.compat import structural_map
from ...ir.expressions import are_equal
from ..kernel.language import activations, functions

#: The name of the function, its argument, and the constant and the other factors of the product.
_Match: TypeAlias = "tuple[str, tirx.PrimExpr, float, list]"

#: The relative tolerance for the constants of an identity: a few float32 roundings.
_TOLERANCE = 2.0**-22

_HALF_ROOT = math.sqrt(0.5)
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
_TANH_LINEAR, _TANH_CUBIC = math.sqrt(2.0 / math.pi), 0.044715

#: The functions that replace matched expressions, by the name of the call that represents them.
FUNCTIONS = {
    f"relax_grad.{function.__name__}": function
    for function in (
        activations.gelu,
        activations.gelu_slope,
        activations.gelu_tanh,
        activations.gelu_tanh_slope,
        activations.normal_cdf,
        activations.silu,
        activations.silu_slope,
        activations.softplus,
        functions.expm1,
    )
}

_EXTERN = Op.get("tirx.call_pure_extern")


def name_of(call: Call) -> str:
    """Return the name of the callee: an operator's name, or a key of :data:`FUNCTIONS`."""
    if not isinstance(call.op, Op):
        return ""
    return str(call.args[0].value) if call.op.same_as(_EXTERN) else call.op.name


def arguments_of(call: Call) -> list[tirx.PrimExpr]:
    """Return the arguments of a call."""
    return list(call.args[1:] if call.op.same_as(_EXTERN) else call.args)


def with_functions(expr: tirx.PrimExpr, can_be: Callable) -> tirx.PrimExpr:
    """Return an expression with calls of :data:`FUNCTIONS` in place of equivalent expressions.

    Parameters
    ----------
    expr : tirx.PrimExpr
        An expression.
    can_be : Callable
        Tells whether a call with a given argument is possible.
    """

    def found(node: tirx.PrimExpr) -> tirx.PrimExpr:
        if str(node.ty.dtype) != "float32":
            return node
        for identity in _IDENTITIES[type(node)]:
            result = identity(node)
            if result is not None and can_be(result[1]):
                name, x, factor, others = result
                call = tirx.call_pure_extern("float32", f"relax_grad.{name}", x)
                return _multiplied(factor, [call, *others])
        return node

    return structural_map(expr, (tuple(_IDENTITIES), found), order="pre")


# Each matcher returns None or (name of a function, its argument, constant factor, other factors of
# the product).


def _products(node: tirx.Mul) -> _Match | None:
    """``x * (1 + erf(x / sqrt(2)))``, ``x * (1 + tanh(...))`` and ``x * sigmoid(x)``."""
    constant, factors = _factors(node)
    candidates = []
    for i, factor in enumerate(factors):
        others = [*factors[:i], *factors[i + 1 :]]
        for name, of in (("gelu", _cdf), ("gelu_tanh", _tanh_cdf), ("silu", _sigmoid)):
            match = of(factor)
            if match is None:
                continue
            scale, x = match
            size, wanted = _factors(x)
            rest = _without(others, wanted)
            if rest is not None and size:
                candidates.append((name, x, constant * scale / size, rest))
    # For nested functions, match the outer one: the inner one remains in its argument.
    return min(candidates, key=lambda candidate: len(candidate[3]), default=None)


def _sums(node: tirx.Add) -> _Match | None:
    """Match the derivatives of both forms of gelu and of silu, the normal CDF, and
    ``exp(x) + (-1)``."""
    first, second = node.a, node.b
    match = _cdf(first)
    if match is not None and _is_slope_of_cdf(second, *match):
        return "gelu_slope", match[1], match[0], []
    match = _tanh_cdf(first)
    if match is not None and _is_slope_of_tanh(second, *match):
        return "gelu_tanh_slope", match[1], match[0], []
    for terms in _either_order(node):
        slope = _silu_slope(*terms)
        if slope is not None:
            return slope
    match = _cdf(node)
    if match is not None:
        return "normal_cdf", match[1], match[0], []
    if _is(second, -1.0) and _is_call(first, "tirx.exp"):
        return "expm1", first.args[0], 1.0, []
    return None


def _differences(node: tirx.Sub) -> _Match | None:
    """``exp(x) - 1``."""
    if _is(node.b, 1.0) and _is_call(node.a, "tirx.exp"):
        return "expm1", node.a.args[0], 1.0, []
    return None


def _logarithms(node: Call) -> _Match | None:
    """``log(1 + exp(x))``."""
    if not _is_call(node, "tirx.log"):
        return None
    for constant, other in _either_order(node.args[0]):
        if _is(constant, 1.0) and _is_call(other, "tirx.exp"):
            return "softplus", other.args[0], 1.0, []
    return None


_IDENTITIES = {
    tirx.Mul: (_products,),
    tirx.Add: (_sums,),
    tirx.Sub: (_differences,),
    Call: (_logarithms,),
}


def _cdf(expr: tirx.PrimExpr) -> tuple[float, tirx.PrimExpr] | None:
    """Return (scale, x) if this is ``scale / 2 * (1 + erf(x / sqrt(2)))``, which is
    ``scale * P(x)``; else None."""
    return _one_and(expr, "tirx.erf", _over_root)


def _tanh_cdf(expr: tirx.PrimExpr) -> tuple[float, tirx.PrimExpr] | None:
    """Return (scale, x) if this is ``scale / 2 * (1 + tanh(k * (x + c * x**3)))``, else None."""
    return _one_and(expr, "tirx.tanh", _cubic)


def _one_and(
    expr: tirx.PrimExpr, name: str, argument: Callable
) -> tuple[float, tirx.PrimExpr] | None:
    """Return ``2 * scale`` and x if this is ``scale + scale * function(a)`` and ``argument(a)`` is
    an x; else None."""
    for constant, other in _either_order(expr):
        if not isinstance(constant, tirx.FloatImm):
            continue
        scale, factors = _factors(other)
        if len(factors) == 1 and _is_call(factors[0], name) and _is(constant, scale):
            x = argument(factors[0].args[0])
            if x is not None:
                return 2.0 * scale, x
    return None


def _sigmoid(expr: tirx.PrimExpr) -> tuple[float, tirx.PrimExpr] | None:
    return (1.0, expr.args[0]) if _is_call(expr, "tirx.sigmoid") else None


def _over_root(expr: tirx.PrimExpr) -> tirx.PrimExpr | None:
    """Return x if this is ``x / sqrt(2)``, else None."""
    if isinstance(expr, tirx.Mul):
        for factor, other in ((expr.a, expr.b), (expr.b, expr.a)):
            if _is(factor, _HALF_ROOT):
                return other
    if isinstance(expr, tirx.Div) and _is(expr.b, 1.0 / _HALF_ROOT):
        return expr.a
    return None


def _cubic(expr: tirx.PrimExpr) -> tirx.PrimExpr | None:
    """Return x if this is ``k * (x + c * x**3)`` with the constants of gelu_tanh, else None."""
    constant, factors = _factors(expr)
    for i, factor in enumerate(factors):
        if not isinstance(factor, tirx.Add):
            continue
        others = [*factors[:i], *factors[i + 1 :]]
        for term, other in _either_order(factor):
            (linear, x), (cubic, thrice) = _factors(term), _factors(other)
            x, thrice = [*others, *x], [*others, *thrice]
            if (
                x
                and _is_near(constant * linear, _TANH_LINEAR)
                and _is_near(constant * cubic, _TANH_LINEAR * _TANH_CUBIC)
                and _without(thrice, 3 * x) == []
            ):
                return reduce(mul, x)
    return None


def _is_slope_of_cdf(expr: tirx.PrimExpr, scale: float, x: tirx.PrimExpr) -> bool:
    """Tell whether this is ``scale * x * phi(x)`` with the normal density."""
    constant, factors = _factors(expr)
    size, wanted = _factors(x)
    for i, factor in enumerate(factors):
        if not _is_call(factor, "tirx.exp"):
            continue
        half, square = _factors(factor.args[0])
        return (
            _is_near(half, -0.5 * size * size)
            and _without(square, 2 * wanted) == []
            and _is_near(constant, scale * _DENSITY * size)
            and _without([*factors[:i], *factors[i + 1 :]], wanted) == []
        )
    return False


def _is_slope_of_tanh(expr: tirx.PrimExpr, scale: float, x: tirx.PrimExpr) -> bool:
    """Tell whether this is ``scale * x * d/dx tanh(k * (x + c * x**3)) / 2`` in the form of
    gelu_tanh's rule."""
    constant, factors = _factors(expr)
    size, wanted = _factors(x)
    if size != 1.0 or len(factors) != 1 or not _is_near(constant, scale * _TANH_LINEAR / 2):
        return False
    for term, other in _either_order(factors[0]):
        (linear, slope), (cubic, rest) = _factors(term), _factors(other)
        if (
            linear == 1.0
            and _is_near(cubic, 3 * _TANH_CUBIC)
            and _without(rest, [*slope, *wanted, *wanted]) == []
        ):
            ends = _without(slope, wanted)
            return ends is not None and len(ends) == 2 and _is_one_minus_square(ends[0], ends[1], x)
    return False


def _silu_slope(first: tirx.PrimExpr, second: tirx.PrimExpr) -> _Match | None:
    """Match ``sigmoid(x) + x * sigmoid(x) * (1 - sigmoid(x))``, also times common factors."""
    scale, factors = _factors(first)
    for i, factor in enumerate(factors):
        if not _is_call(factor, "tirx.sigmoid"):
            continue
        x, others = factor.args[0], [*factors[:i], *factors[i + 1 :]]
        size, wanted = _factors(x)
        constant, own = _factors(second)
        rest = _without(own, [*others, factor, *wanted])
        if rest is not None and len(rest) == 1 and _is_near(constant, scale * size):
            (last,) = rest
            if isinstance(last, tirx.Sub) and _is(last.a, 1.0) and are_equal(last.b, factor):
                return "silu_slope", x, scale, others
    return None


def _is_one_minus_square(factor: tirx.PrimExpr, other: tirx.PrimExpr, x: tirx.PrimExpr) -> bool:
    """Tell whether two factors are ``1 - tanh(...)`` and ``1 + tanh(...)`` of gelu_tanh's
    argument."""
    for minus, plus in ((factor, other), (other, factor)):
        match = _tanh_cdf(plus)
        if match is not None and isinstance(minus, tirx.Sub):
            has_same = _is(minus.a, 1.0) and any(
                are_equal(minus.b, term) for term in (plus.a, plus.b)
            )
            return has_same and match[0] == 2.0 and are_equal(match[1], x)
    return False


# Parts of expressions


def _factors(expr: tirx.PrimExpr) -> tuple[float, list]:
    """Return the constant and the other factors of a product."""
    if isinstance(expr, tirx.FloatImm):
        return expr.value, []
    if isinstance(expr, tirx.Mul):
        (first, some), (second, others) = _factors(expr.a), _factors(expr.b)
        return first * second, [*some, *others]
    if isinstance(expr, tirx.Div) and isinstance(expr.b, tirx.FloatImm) and expr.b.value:
        constant, factors = _factors(expr.a)
        return constant / expr.b.value, factors
    if _is_call(expr, "tirx.pow") and any(_is(expr.args[1], times) for times in (2, 3)):
        constant, factors = _factors(expr.args[0])
        times = int(expr.args[1].value)
        return constant**times, factors * times
    return 1.0, [expr]


def _without(factors: Sequence, wanted: Sequence) -> list | None:
    """Return the factors that remain after removing the wanted ones, or None if some are
    missing."""
    rest = list(factors)
    for target in wanted:
        for i, factor in enumerate(rest):
            if are_equal(target, factor):
                del rest[i]
                break
        else:
            return None
    return rest


def _multiplied(constant: float, factors: Sequence) -> tirx.PrimExpr:
    product = reduce(mul, factors)
    return product if constant == 1.0 else product * tirx.const(constant, "float32")


def _either_order(expr: tirx.PrimExpr) -> tuple:
    """Return the two terms of a sum in both orders; an empty tuple if this is not a sum."""
    return ((expr.a, expr.b), (expr.b, expr.a)) if isinstance(expr, tirx.Add) else ()


def _is_call(expr: tirx.PrimExpr, name: str) -> bool:
    return isinstance(expr, Call) and isinstance(expr.op, Op) and expr.op.name == name


def _is(expr: tirx.PrimExpr, value: float) -> bool:
    return isinstance(expr, tirx.FloatImm) and _is_near(expr.value, value)


def _is_near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= _TOLERANCE * abs(wanted)
