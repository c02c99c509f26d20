"""Converters of products with logarithms, and of the logarithm of the gamma function and its
derivative."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax

from ._call import Call, converts, dtype, scalar, wide_dtype
from ._support import Converter
from .elementwise import log1p

SPECIAL: dict[str, Converter] = {}

_op = relax.op

#: Arguments below are raised by this number: Stirling's series is exact to a rounding from there
#: on.
_SHIFT = 8

#: The Bernoulli numbers B_2, B_4, and so on.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)

_KIND = "float64"


class _Argument:
    """An argument, and the positive number whose value the reflection formula gives its own."""

    def __init__(self, call: Call, data: relax.Expr):
        self.call = call
        self.data = call.cast(data, _KIND)
        one = scalar(1, _KIND)
        zero = scalar(0, _KIND)
        self.reflected = call.emit(_op.less_equal(self.data, zero))
        self.positive = self.chosen(self.reflected, _op.subtract(one, self.data), self.data)
        self.small = call.emit(_op.less(self.positive, scalar(_SHIFT, _KIND)))
        self.base = self.chosen(self.small, self.positive, one)
        raised = call.emit(_op.add(self.base, scalar(_SHIFT, _KIND)))
        self.large = self.chosen(self.small, raised, self.positive)
        part = call.emit(_op.subtract(self.data, _op.round(self.data)))
        part = self.chosen(self.reflected, part, scalar(0.5, _KIND))
        self.angle = call.emit(_op.multiply(part, scalar(math.pi, _KIND)))

    def chosen(self, condition: relax.Expr, value: relax.Expr, other: relax.Expr) -> relax.Expr:
        return self.call.emit(_op.where(condition, self.call.emit(value), other))

    def series(self, term: Callable[[int], float]) -> relax.Expr:
        """Return the sum of terms times the inverse square of the large number to the powers from 0
        on."""
        inverse = self.call.emit(_op.divide(scalar(1, _KIND), self.large))
        square = self.call.emit(_op.multiply(inverse, inverse))
        polynomial = scalar(0, _KIND)
        for k in reversed(range(len(_BERNOULLI))):
            polynomial = _op.add(_op.multiply(polynomial, square), scalar(term(k), _KIND))
        return self.call.emit(_op.multiply(self.call.emit(polynomial), inverse))


@converts(SPECIAL, "lgamma.default")
def _lgamma(call: Call, data: relax.Expr) -> relax.Expr:
    """Stirling's series, the recurrence below 8, and the reflection below 0, computed in
    float64."""
    x = _Argument(call, data)
    half = scalar(0.5, _KIND)
    log = call.emit(_op.log(x.large))
    result = _op.subtract(_op.multiply(_op.subtract(x.large, half), log), x.large)
    result = _op.add(result, scalar(0.5 * math.log(2 * math.pi), _KIND))
    tail = x.series(lambda k: _BERNOULLI[k] / ((2 * k + 1) * (2 * k + 2)))
    result = call.emit(_op.add(result, tail))
    product = x.base
    for k in range(1, _SHIFT):
        product = call.emit(_op.multiply(product, _op.add(x.base, scalar(k, _KIND))))
    lowered = call.emit(_op.subtract(result, _op.log(product)))
    result = x.chosen(x.small, lowered, result)
    turned = _op.subtract(scalar(math.log(math.pi), _KIND), _op.log(_op.abs(_op.sin(x.angle))))
    result = x.chosen(x.reflected, _op.subtract(turned, result), result)
    infinite = call.emit(_op.isinf(x.data))
    result = x.chosen(infinite, _op.abs(x.data), result)
    return call.cast(result, call.dtype)


@converts(SPECIAL, "digamma.default")
def _digamma(call: Call, data: relax.Expr) -> relax.Expr:
    """The derivative of :func:`_lgamma`; NaN at the poles, and an infinity of the other sign at a
    zero."""
    x = _Argument(call, data)
    one = scalar(1, _KIND)
    tail = x.series(lambda k: _BERNOULLI[k] / (2 * k + 2))
    tail = call.emit(_op.add(scalar(0.5, _KIND), tail))
    result = call.emit(_op.subtract(_op.log(x.large), _op.divide(tail, x.large)))
    lowered = result
    for k in range(_SHIFT):
        inverse = _op.divide(one, _op.add(x.base, scalar(k, _KIND)))
        lowered = call.emit(_op.subtract(lowered, inverse))
    result = x.chosen(x.small, lowered, result)
    slope = call.emit(_op.divide(_op.cos(x.angle), _op.sin(x.angle)))
    turned = _op.subtract(result, _op.multiply(scalar(math.pi, _KIND), slope))
    whole = call.emit(_op.equal(x.angle, scalar(0, _KIND)))
    turned = x.chosen(whole, scalar(math.nan, _KIND), call.emit(turned))
    result = x.chosen(x.reflected, turned, result)
    origin = call.emit(_op.equal(x.data, scalar(0, _KIND)))
    pole = call.emit(_op.divide(scalar(-1, _KIND), x.chosen(origin, x.data, one)))
    return call.cast(x.chosen(origin, pole, result), call.dtype)


@converts(SPECIAL, "sinc.default")
def _sinc(call: Call, data: relax.Expr) -> relax.Expr:
    """The value at zero is one, with the derivatives of the series."""
    kind = dtype(data)
    inner = call.cast(data, call.dtype if kind != call.dtype else wide_dtype(kind))
    kind = dtype(inner)
    origin = call.emit(_op.equal(inner, scalar(0, kind)))
    safe = call.emit(_op.where(origin, scalar(1, kind), inner))
    angle = call.emit(_op.multiply(safe, scalar(math.pi, kind)))
    quotient = call.emit(_op.divide(_op.sin(angle), angle))
    square = call.emit(_op.multiply(inner, inner))
    series = scalar(0, kind)
    for factor in (math.pi**4 / 120, -(math.pi**2) / 6, 1):
        series = call.emit(_op.add(_op.multiply(series, square), scalar(factor, kind)))
    return call.cast(call.emit(_op.where(origin, series, quotient)), call.dtype)


@converts(SPECIAL, "special_entr.default")
def _entr(call: Call, data: relax.Expr) -> relax.Expr:
    """The derivatives at zero are infinite, as a root's are."""
    kind = call.dtype
    data = call.cast(data, wide_dtype(kind))
    zero, one = scalar(0, dtype(data)), scalar(1, dtype(data))
    origin = call.emit(_op.equal(data, zero))
    root = call.emit(_op.sqrt(call.emit(_op.where(origin, data, one))))
    safe = call.emit(_op.where(origin, one, data))
    result = call.emit(_op.multiply(_op.negative(safe), _op.log(safe)))
    lost = call.emit(_op.less(data, zero))
    below = call.filled(call.shape, -math.inf, dtype(data))
    result = call.emit(_op.where(lost, below, call.emit(_op.where(origin, root, result))))
    return call.cast(result, kind)


@converts(SPECIAL, "xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def _xlogy(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    """Zero times the logarithm of zero is zero, without a gradient."""
    kind = call.dtype
    data, other = (call.cast(call.tensor(x, kind), wide_dtype(kind)) for x in (data, other))
    zero = scalar(0, dtype(data))
    lost = call.emit(_op.logical_and(_op.equal(data, zero), call.emit(_op.less_equal(other, zero))))
    safe = call.emit(_op.where(lost, scalar(1, dtype(data)), other))
    return call.cast(call.emit(_op.multiply(data, _op.log(safe))), kind)


@converts(
    SPECIAL,
    *("special_xlog1py.default", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar"),
)
def _xlog1py(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    """Zero times the logarithm of zero is zero, without a gradient."""
    kind = call.dtype
    data, other = (call.cast(call.tensor(x, kind), wide_dtype(kind)) for x in (data, other))
    zero, pole = scalar(0, dtype(data)), scalar(-1, dtype(data))
    lost = call.emit(_op.logical_and(_op.equal(data, zero), call.emit(_op.less_equal(other, pole))))
    safe = call.emit(_op.where(lost, zero, other))
    return call.cast(call.emit(_op.multiply(data, log1p(call, safe))), kind)
