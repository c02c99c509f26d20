"""Activations of float32 whose usual forms cancel: the cumulative normal distribution, and products
with a sigmoid.

``1 + erf(x / sqrt(2))`` and ``1 + tanh(x)`` lose all digits by cancellation where they are close
to 0. Here, the tail is computed by itself: an exponential times a function that varies slowly. Each
function takes ``bind``, like those of :mod:`.functions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from . import functions
from .builder import bind as emit_bind
from .functions import (
    EXPM1,
    LOG2_HIGH,
    LOG2_LOW,
    LOWERED,
    RAISED,
    as_bits,
    like,
    magnitude,
    narrowed,
    polynomial,
    raised,
    rounded_parts,
    split_exp,
    split_exp2,
    widened,
)

#: The arguments from which on the tail is 0. Each function has its own: the exponents may not be
#: much lower.
_NORMAL_END, _TANH_END, _SIGMOID_END = 14.7, 10.9, 112.0

#: The x with ``Q(x) = x * phi(x)``, in two parts: -x is the root of the derivative of gelu.
_ROOT_HIGH, _ROOT_LOW = 0.7517915368080139, -1.211444945855772e-8

#: ``(exp(-q / 2) - 1 + q / 2) / q**2`` for q between -log(2) and log(2).
_DENSITY = [
    coefficient * (-0.5) ** power for power, coefficient in zip(range(6, 1, -1), EXPM1, strict=True)
]

#: ``(1 - P(a)) * (a + c) * exp(a**2 / 2)`` with the normal CDF P, for a >= 0: c, and a minimax
#: polynomial of ``a / (a + c)``. The relative error of the argument weighs less for larger a, where
#: the exponential has the larger errors.
_MILLS_SHIFT = 2.625
_MILLS = [
    -6.680071354e-2,
    1.950363219e-1,
    -1.498727798e-1,
    3.479290009e-2,
    -1.305773706e-1,
    -1.338485163e-2,
    3.171219230e-1,
    3.365615606e-1,
    -1.436461568,
    1.3125,
]

#: The derivative of gelu at -a, times ``exp(a**2 / 2)``, divided by the distance from its root. It
#: is the sum of a constant and a quotient; the quotient is the smaller term, so that its error
#: weighs less.
_SLOPE_CONSTANT = 0.3984375
_SLOPE = (
    [1.32574742e-5, 7.94951431e-3, 6.19222336e-2, 1.96274161e-1, 2.66640484e-1],
    [2.61445772e-2, 2.20053211e-1, 7.92952299e-1, 1.39861453, 1.0],
)

#: gelu_tanh is ``x / (1 + 2**(-k * x - k * c * x**3))``: k, and k * c.
_LINEAR = 2.0 * math.sqrt(2.0 / math.pi) / math.log(2)
_CUBIC = _LINEAR * 0.044715


#: The a such that -a is the root of the derivative of gelu_tanh, in two parts; the distance from it
#: within which a polynomial of the distance is used; and that polynomial, divided by the distance.
_TANH_ROOT_HIGH, _TANH_ROOT_LOW = 0.7524614334106445, -1.1339628272762046e-08
_TANH_DISTANCE = 0.15
_TANH_NEAR = [
    1.952071142e-2,
    -1.644290902e-2,
    -1.139415446e-1,
    -1.578433523e-2,
    3.875184326e-1,
    4.304000929e-1,
]


def normal_cdf(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the normal CDF at x, ``(1 + erf(x / sqrt(2))) / 2``, within 4 units in the last
    place."""
    a = bind(tirx.Min(like(x, _NORMAL_END), magnitude(x)))
    p, n = _normal_density(a, bind)
    share = bind(like(a, 1.0) / (a + like(a, _MILLS_SHIFT)))
    mills = bind(polynomial(bind(a * share), _MILLS, bind) * share)
    tail = _lowered(mills, p, n, bind)
    return bind(tirx.Select(x < like(x, 0.0), tail, like(x, 1.0) - tail))


def gelu(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return x times the normal CDF at x, within 4 units in the last place; NaN at minus infinity,
    like PyTorch's."""
    a = bind(tirx.Min(like(x, _NORMAL_END), magnitude(x)))
    p, n = _normal_density(a, bind)
    share = bind(a / (a + like(a, _MILLS_SHIFT)))
    tail = _lowered(bind(polynomial(share, _MILLS, bind) * share), p, n, bind)
    return _positive_part(x, bind) - tail


def gelu_slope(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the derivative of gelu, ``P(x) + x * phi(x)``, within 4 units in the last place, also
    around its root.

    It is NaN at both infinities, like PyTorch's.
    """
    a = bind(tirx.Min(like(x, _NORMAL_END), magnitude(x)))
    p, n = _normal_density(a, bind)
    distance = bind((like(x, _ROOT_HIGH) - a) + like(x, _ROOT_LOW))
    numerator, denominator = (polynomial(a, coefficients, bind) for coefficients in _SLOPE)
    share = bind(numerator / denominator + like(a, _SLOPE_CONSTANT))
    tail = _lowered(bind(distance * share), p, n, bind)
    return _slope(x, tail, bind)


def gelu_tanh(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return ``x * (1 + tanh(...)) / 2``, within 4 units in the last place; NaN at minus infinity,
    like PyTorch's."""
    a = bind(tirx.Min(like(x, _TANH_END), magnitude(x)))
    wide = bind(widened(a))
    p, n = _tanh_exponential(wide, bind(wide * wide), bind)
    return _positive_part(x, bind) - _sigmoid_tail(a, bind(p + like(x, 1.0)), n, bind)


def gelu_tanh_slope(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the derivative of gelu_tanh, within 4 units in the last place, also around its root.

    It is NaN at both infinities, like PyTorch's.
    """
    a = bind(tirx.Min(like(x, _TANH_END), magnitude(x)))
    wide = bind(widened(a))
    square = bind(wide * wide)
    p, n = _tanh_exponential(wide, square, bind)
    e = bind(raised(p + like(x, 1.0), n, bind) * like(x, LOWERED))
    # At -a, the derivative is e / (1 + e)**2 times a difference, which cancels around the root.
    cubic, linear = (math.log(2) * coefficient for coefficient in (3 * _CUBIC, _LINEAR))
    product = wide * (square * like(x, cubic, "float64") + like(x, linear, "float64"))
    difference = narrowed(bind(like(x, 1.0, "float64") - product)) + e
    square_of_sum = e * (e + like(x, 2.0)) + like(x, 1.0)
    far = _lowered(bind(difference / square_of_sum), p, n, bind)
    distance = bind((like(x, _TANH_ROOT_HIGH) - a) + like(x, _TANH_ROOT_LOW))
    near = bind(distance * polynomial(distance, _TANH_NEAR, bind))
    is_near = magnitude(distance) < like(x, _TANH_DISTANCE)
    return _slope(x, bind(tirx.Select(is_near, near, far)), bind)


def silu(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return ``x * sigmoid(x)``, within 4 units in the last place; NaN at minus infinity, like
    PyTorch's."""
    a = bind(tirx.Min(like(x, _SIGMOID_END), magnitude(x)))
    p, n = split_exp(bind(like(x, 0.0) - a), bind)
    return _positive_part(x, bind) - _sigmoid_tail(a, bind(p), n, bind)


def silu_slope(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the derivative of silu, within 4 units in the last place; within 8e-9 around its
    root.

    It is NaN at both infinities, like PyTorch's.
    """
    a = bind(tirx.Min(like(x, _SIGMOID_END), magnitude(x)))
    p, n = split_exp(bind(like(x, 0.0) - a), bind)
    p = bind(raised(p, n, bind))
    e = bind(p * like(a, LOWERED))
    # At -a, the derivative is e * (1 - a + e) / (1 + e)**2.
    difference = bind((like(x, 1.0) - a) + e)
    square = bind(e * (e + like(a, 2.0)) + like(a, 1.0))
    tail = bind(difference * p / square * like(a, LOWERED))
    return _slope(x, tail, bind)


def softplus(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return ``log(1 + exp(x))``, within 3 units in the last place, also for negative x (about
    ``exp(x)``)."""
    e = functions.exp(bind(like(x, 0.0) - magnitude(x)), bind)
    # With the operands in this order, a NaN propagates.
    return bind(tirx.Max(like(x, 0.0), x) + functions.log1p(e, bind))


def _normal_density(a: tirx.PrimExpr, bind: Callable) -> tuple:
    """Return p and an int32 n such that ``exp(-a**2 / 2)`` is ``(1 + p) * 2**n``, for a between 0
    and 16.

    The square is computed from two parts of a. The first has so few bits that its square is exact:
    an absolute error of the exponent becomes a relative error of the result.
    """
    square, high = bind(a * a), _leading(a, bind)
    about = square * like(a, -0.5 * math.log2(math.e))
    rounded, n = rounded_parts(about, bind, RAISED)
    # a**2 is q - 2 * n * log(2).
    q = bind(high * high + rounded * like(a, 2.0 * LOG2_HIGH))
    q = bind((a - high) * (a + high) + q)
    q = bind(rounded * like(a, 2.0 * LOG2_LOW) + q)
    return bind(polynomial(q, _DENSITY, bind) * (q * q) - q * like(q, 0.5)), n


def _leading(x: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return the 12 leading bits of a number."""
    return bind(as_bits(as_bits(x, "int32") & like(x, -4096, "int32"), "float32"))


def _tanh_exponential(a: tirx.PrimExpr, square: tirx.PrimExpr, bind: Callable) -> tuple:
    """Return p and an int32 n such that ``2**(-k * a - k * c * a**3)`` is ``(1 + p) * 2**n``, for a
    float64 a.

    In float32, the rounding error of the exponent would become a relative error of the result.
    """
    slope = bind(square * like(a, -_CUBIC, "float64") - like(a, _LINEAR, "float64"))
    return split_exp2(bind(a * slope), bind)


def _sigmoid_tail(
    a: tirx.PrimExpr, p: tirx.PrimExpr, n: tirx.PrimExpr, bind: Callable
) -> tirx.PrimExpr:
    """Return ``a * e / (1 + e)`` for an exponential ``e = p * 2**n`` with n between -190 and 0."""
    p = raised(p, n, bind)
    e = bind(p * like(a, LOWERED))
    return bind(a * p / (like(a, 1.0) + e) * like(a, LOWERED))


def _lowered(
    factor: tirx.PrimExpr, p: tirx.PrimExpr, n: tirx.PrimExpr, bind: Callable
) -> tirx.PrimExpr:
    """Return ``factor * (1 + p) * 2**n``, which may be subnormal, for n between -190 and 0.

    The sum of 1 and p is not rounded separately.
    """
    return bind(raised(bind(factor * p + factor), n, bind) * like(factor, LOWERED))


def _slope(x: tirx.PrimExpr, tail: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return the derivative of x times a CDF, given its value at ``-abs(x)``; NaN at both
    infinities."""
    slope = bind(tirx.Select(x < like(x, 0.0), tail, like(x, 1.0) - tail))
    is_finite = magnitude(x) < like(x, float("inf"))
    return bind(tirx.Select(is_finite, slope, like(x, float("nan"))))


def _positive_part(x: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return the maximum of x and 0; NaN at minus infinity."""
    half = like(x, 0.5)
    return bind(half * x + half * magnitude(x))
