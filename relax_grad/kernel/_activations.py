"""Activations of float32 whose usual forms cancel: the normal distribution, and products with a sigmoid.

``1 + erf(x / sqrt(2))`` and ``1 + tanh(x)`` have no digits left where they are close to 0. Here, the part that
vanishes is computed by itself: an exponential times a function that varies slowly. Each function takes ``bind``, as
those of :mod:`._math` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

from . import _math
from ._builder import bind as emit_bind
from ._math import (
    as_bits,
    like,
    magnitude,
    polynomial,
    reduced,
    scaled,
    small_exp,
    split_exp,
    split_exp2,
    widened,
)

#: An argument from which on the part that vanishes is 0: its exponent is below -104, which is less than half of the
#: least float32. One for each function, for the powers of 2 of an exponent that is far lower are no float32.
_NORMAL_END, _TANH_END, _SIGMOID_END = 14.7, 10.9, 112.0

#: The x at which ``Q(x) = x * phi(x)``, in two parts: where the derivative of gelu is 0, at -x.
_ROOT_HIGH, _ROOT_LOW = 0.7517915368080139, -1.211444945855772e-8

#: ``(1 - P(a)) * exp(a**2 / 2)`` with the normal distribution P, a quotient of two polynomials for a >= 0.
_MILLS = (
    [5.5568032e-3, 5.4789722e-2, 0.246865511, 0.590081036, 0.672541559],
    [1.39286835e-2, 0.137345955, 0.63253051, 1.61912298, 2.25338364, 1.34508312],
)

#: The derivative of gelu at -a, times ``exp(a**2 / 2)``, divided by the distance from its root.
_SLOPE = (
    [1.22913625e-2, 0.112690441, 0.445290029, 0.88799572, 0.7837556],
    [3.08096986e-2, 0.259319097, 0.934446394, 1.6481843, 1.17844164],
)

#: gelu_tanh is ``x / (1 + 2**(-k * x - k * c * x**3))``: k, and k * c.
_LINEAR = 2.0 * math.sqrt(2.0 / math.pi) / math.log(2)
_CUBIC = _LINEAR * 0.044715


#: The a at which the derivative of gelu_tanh is 0 at -a, in two parts; how far around it a polynomial of the distance
#: stands for the sum that cancels, and the polynomial, divided by the distance.
_TANH_ROOT_HIGH, _TANH_ROOT_LOW = 0.7524614334106445, -1.1339628272762046e-08
_TANH_DISTANCE = 0.25
_TANH_NEAR = [
    1.144492882e-2,
    3.083409202e-2,
    7.595324081e-2,
    4.004395283e-1,
    -9.991146445e-2,
    2.460656793,
]


def normal_cdf(x, bind: Callable = emit_bind):
    """Return the normal distribution of x, ``(1 + erf(x / sqrt(2))) / 2``, within 4 units in the last place."""
    a = bind(tirx.Min(like(x, _NORMAL_END), magnitude(x)))
    p, n = _normal_density(a, bind)
    tail = scaled(bind(p * _quotient(a, _MILLS, bind)), n, bind)
    return bind(tirx.Select(x < like(x, 0.0), tail, like(x, 1.0) - tail))


def gelu(x, bind: Callable = emit_bind):
    """Return x times its normal distribution, within 4 units in the last place; NaN at minus infinity, as PyTorch's."""
    a = bind(tirx.Min(like(x, _NORMAL_END), magnitude(x)))
    p, n = _normal_density(a, bind)
    tail = scaled(bind(a * _quotient(a, _MILLS, bind) * p), n, bind)
    return _positive_part(x, bind) - tail


def gelu_slope(x, bind: Callable = emit_bind):
    """Return the derivative of gelu, ``P(x) + x * phi(x)``, within 4 units in the last place, also around its root.

    It is NaN at both infinities, as PyTorch's.
    """
    a = bind(tirx.Min(like(x, _NORMAL_END), magnitude(x)))
    p, n = _normal_density(a, bind)
    distance = bind((like(x, _ROOT_HIGH) - a) + like(x, _ROOT_LOW))
    tail = scaled(bind(distance * _quotient(a, _SLOPE, bind) * p), n, bind)
    return _slope(x, tail, bind)


def gelu_tanh(x, bind: Callable = emit_bind):
    """Return ``x * (1 + tanh(...)) / 2``, within 4 units in the last place; NaN at minus infinity, as PyTorch's."""
    a = bind(tirx.Min(like(x, _TANH_END), magnitude(x)))
    p, n = _tanh_exponential(a, bind)
    return _positive_part(x, bind) - _sigmoid_tail(a, p, n, bind)


def gelu_tanh_slope(x, bind: Callable = emit_bind):
    """Return the derivative of gelu_tanh, within 4 units in the last place, also around its root.

    It is NaN at both infinities, as PyTorch's.
    """
    a = bind(tirx.Min(like(x, _TANH_END), magnitude(x)))
    p, n = _tanh_exponential(a, bind)
    p = bind(p)
    e = scaled(p, n, bind)
    # At -a it is e / (1 + e)**2 times this, which cancels around the root.
    cubic, linear = 3 * math.log(2) * _CUBIC, math.log(2) * _LINEAR
    difference = bind(like(x, 1.0) + e - a * (a * a * like(x, cubic) + like(x, linear)))
    distance = bind((like(x, _TANH_ROOT_HIGH) - a) + like(x, _TANH_ROOT_LOW))
    near = bind(distance * polynomial(distance, _TANH_NEAR, bind))
    is_near = magnitude(distance) < like(x, _TANH_DISTANCE)
    difference = bind(tirx.Select(is_near, near, difference))
    share = bind(like(x, 1.0) / (like(x, 1.0) + e))
    return _slope(x, scaled(bind(p * difference * share * share), n, bind), bind)


def silu(x, bind: Callable = emit_bind):
    """Return ``x * sigmoid(x)``, within 4 units in the last place; NaN at minus infinity, as PyTorch's."""
    a = bind(tirx.Min(like(x, _SIGMOID_END), magnitude(x)))
    p, n = split_exp(bind(like(x, 0.0) - a), bind)
    return _positive_part(x, bind) - _sigmoid_tail(a, bind(p), n, bind)


def softplus(x, bind: Callable = emit_bind):
    """Return ``log(1 + exp(x))``, within 3 units in the last place: of a negative x, about its exponential."""
    e = _math.exp(bind(like(x, 0.0) - magnitude(x)), bind)
    # In this order, a NaN passes the comparison.
    return bind(tirx.Max(like(x, 0.0), x) + _math.log1p(e, bind))


def _normal_density(a, bind: Callable) -> tuple:
    """Return p and an int32 n such that ``exp(-a**2 / 2)`` is ``p * 2**n``, for a between 0 and 16.

    The square is taken of two parts of a, the first of which has so few bits that its square is exact: an error of the
    exponent is the relative one of the result.
    """
    high = bind(as_bits(as_bits(a, "int32") & like(a, -4096, "int32"), "float32"))
    rest = bind((a - high) * (a + high) * like(a, 0.5))
    n, r = reduced(bind(high * high * like(a, -0.5)), bind, about=a * a * like(a, -0.5))
    return bind(small_exp(bind(r - rest), bind)), n


def _tanh_exponential(a, bind: Callable) -> tuple:
    """Return p and an int32 n such that ``2**(-k * a - k * c * a**3)`` is ``p * 2**n``.

    The exponent is computed in float64, for its error is the relative one of the result.
    """
    wide = bind(widened(a))
    slope = bind(wide * wide * like(a, -_CUBIC, "float64") - like(a, _LINEAR, "float64"))
    return split_exp2(bind(wide * slope), bind)


def _sigmoid_tail(a, p, n, bind: Callable):
    """Return ``a * e / (1 + e)`` of an exponential ``e = p * 2**n``."""
    e = scaled(p, n, bind)
    return scaled(bind(a * p / (like(a, 1.0) + e)), n, bind)


def _slope(x, tail, bind: Callable):
    """Return the derivative of x times a distribution, given that at ``-abs(x)``; NaN at both infinities."""
    slope = bind(tirx.Select(x < like(x, 0.0), tail, like(x, 1.0) - tail))
    is_finite = magnitude(x) < like(x, float("inf"))
    return bind(tirx.Select(is_finite, slope, like(x, float("nan"))))


def _positive_part(x, bind: Callable):
    """Return the larger one of x and 0, and NaN at minus infinity."""
    half = like(x, 0.5)
    return bind(half * x + half * magnitude(x))


def _quotient(a, polynomials: tuple, bind: Callable):
    numerator, denominator = polynomials
    return polynomial(a, numerator, bind) / polynomial(a, denominator, bind)
