"""Converters of the inverse error function and of the quantiles of the normal distribution."""

from __future__ import annotations

import math

from tvm import relax

from ._call import Call, converts, scalar
from ._support import Converter

NORMAL: dict[str, Converter] = {}

_op = relax.op

_KIND = "float64"

#: The numerators and denominators, highest powers first, of an approximation of the quantiles:
#: M. J. Wichura, Algorithm AS 241, Applied Statistics 37 (1988). The first pair is for
#: probabilities near a half, the others for smaller and for the smallest ones.
_RATIONALS = (
    (
        (
            2509.0809287301227,
            33430.57558358813,
            67265.7709270087,
            45921.95393154987,
            13731.69376550946,
            1971.5909503065513,
            133.14166789178438,
            3.3871328727963665,
        ),
        (
            5226.495278852854,
            28729.085735721943,
            39307.89580009271,
            21213.794301586597,
            5394.196021424751,
            687.1870074920579,
            42.31333070160091,
            1.0,
        ),
    ),
    (
        (
            0.0007745450142783414,
            0.022723844989269184,
            0.2417807251774506,
            1.2704582524523684,
            3.6478483247632045,
            5.769497221460691,
            4.630337846156546,
            1.4234371107496835,
        ),
        (
            1.0507500716444169e-09,
            0.0005475938084995345,
            0.015198666563616457,
            0.14810397642748008,
            0.6897673349851,
            1.6763848301838038,
            2.053191626637759,
            1.0,
        ),
    ),
    (
        (
            2.0103343992922881e-07,
            2.7115555687434876e-05,
            0.0012426609473880784,
            0.026532189526576124,
            0.29656057182850487,
            1.7848265399172913,
            5.463784911164114,
            6.657904643501103,
        ),
        (
            2.0442631033899397e-15,
            1.421511758316446e-07,
            1.8463183175100548e-05,
            0.0007868691311456133,
            0.014875361290850615,
            0.1369298809227358,
            0.599832206555888,
            1.0,
        ),
    ),
)

#: The distance from a half up to which the first pair holds; the numbers that arguments of the
#: other pairs are relative to; and the largest root of a logarithm for which the second pair holds.
_NEAR, _CENTRES, _FAR = 0.425, (1.6, 5.0), 5.0


@converts(NORMAL, "erfinv.default")
def _erfinv(call: Call, data: relax.Expr) -> relax.Expr:
    half = call.emit(_op.multiply(call.cast(data, _KIND), _number(0.5)))
    tail = call.emit(_op.subtract(_number(0.5), call.emit(_op.abs(half))))
    result = call.emit(_quantile(call, half, tail))
    return call.cast(call.emit(_op.multiply(result, _number(math.sqrt(0.5)))), call.dtype)


@converts(NORMAL, "special_ndtri.default")
def _ndtri(call: Call, data: relax.Expr) -> relax.Expr:
    data = call.cast(data, _KIND)
    distance = call.emit(_op.subtract(data, _number(0.5)))
    below = call.emit(_op.less_equal(distance, _number(0)))
    tail = _op.where(below, data, call.emit(_op.subtract(_number(1), data)))
    return call.cast(call.emit(_quantile(call, distance, call.emit(tail))), call.dtype)


def _quantile(call: Call, distance: relax.Expr, tail: relax.Expr) -> relax.Expr:
    """Return the quantiles of the normal distribution.

    The quantiles of 0 and 1 are infinite, with infinite derivatives, and NaN for numbers outside.
    Each part is computed from numbers within its range, so that its derivatives exist.

    Parameters
    ----------
    distance : relax.Expr
        The probabilities, less a half.
    tail : relax.Expr
        The smaller ones of the probabilities and their complements.
    """
    size = call.emit(_op.abs(distance))
    near = call.emit(_op.less_equal(size, _number(_NEAR)))
    outside = call.emit(_op.less_equal(tail, _number(0)))
    apart = call.emit(_op.logical_or(near, outside))
    inner = _chosen(call, near, distance, _number(0))
    square = call.emit(_op.multiply(inner, inner))
    ratio = _ratio(call, call.emit(_op.subtract(_number(_NEAR**2), square)), _RATIONALS[0])
    centre = call.emit(_op.multiply(inner, ratio))
    log = call.emit(_op.log(_chosen(call, apart, _number(0.05), tail)))
    root = call.emit(_op.sqrt(call.emit(_op.negative(log))))
    is_far = call.emit(_op.greater(root, _number(_FAR)))
    sides = []
    for start, rational, fits in zip(
        _CENTRES, _RATIONALS[1:], (_op.logical_not(is_far), is_far), strict=True
    ):
        own = _chosen(call, call.emit(fits), root, _number(start))
        sides.append(_ratio(call, call.emit(_op.subtract(own, _number(start))), rational))
    side = _op.where(is_far, sides[1], sides[0])
    side = call.emit(_op.multiply(_op.sign(distance), call.emit(side)))
    edge = _chosen(call, outside, call.emit(_op.add(distance, distance)), _number(0))
    left = call.emit(_op.subtract(_number(1), _op.abs(edge)))
    limit = call.emit(_op.divide(edge, call.emit(_op.sqrt(left))))
    return _op.where(outside, limit, _chosen(call, near, centre, side))


def _ratio(
    call: Call, argument: relax.Expr, rational: tuple[tuple[float, ...], tuple[float, ...]]
) -> relax.Expr:
    """Return the quotient of two polynomials, given by their coefficients, highest powers
    first."""
    parts = []
    for first, *others in rational:
        value: relax.Expr = _number(first)
        for coefficient in others:
            value = call.emit(_op.add(_op.multiply(value, argument), _number(coefficient)))
        parts.append(value)
    return call.emit(_op.divide(*parts))


def _number(value: float) -> relax.Constant:
    return scalar(value, _KIND)


def _chosen(call: Call, condition: relax.Expr, value: relax.Expr, other: relax.Expr) -> relax.Var:
    return call.emit(_op.where(condition, value, other))
