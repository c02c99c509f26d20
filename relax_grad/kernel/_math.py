"""Elementary functions of float32 as polynomials, of scalars and of vectors.

LLVM calls the C library for each lane of a vector; these have no calls, no branches and no tables. They have
few conditions either: TVM's simplifier writes out all that a condition is made of. Each takes
``bind``, which names a value that is used more than once: kernels emit a statement, and :func:`expression`
makes one expression of it all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx

from ._builder import bind as emit_bind

#: 1.5 * 2**23: a float32 near 0 that is added to it is rounded to an integer, in its lowest bits.
_MAGIC, _MAGIC_BITS = 12582912.0, 0x4B400000

#: log(2) in two parts, the first of few enough bits that a product with an exponent is exact.
_LOG2_HIGH, _LOG2_LOW = 0.693359375, -2.12194440e-4

#: Where :func:`erf` begins to be 1.
_ERF_END = 3.832506856900711


def expression(function: Callable, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a function of a value as one expression.

    Parameters
    ----------
    function : Callable
        One of the functions here.
    x : tirx.PrimExpr
        Its argument.
    """
    names = []

    def bind(value):
        names.append((tirx.Var(f"t{len(names)}", value.ty.dtype), value))
        return names[-1][0]

    result = function(bind(x), bind)
    for name, value in reversed(names):
        result = tirx.Let(name, value, result)
    return result


def exp(x, bind: Callable = emit_bind):
    """Return e to the power of x, within 1 unit in the last place.

    With ``x = n * log(2) + r`` it is ``2**n`` times a polynomial in r, that of Cephes' expf (S. L. Moshier).
    Results that are not normal numbers, infinity and NaN are right too.
    """
    # In this order, a NaN passes both comparisons.
    x = bind(tirx.Min(_like(x, 89.0), tirx.Max(_like(x, -104.0), x)))
    p, n = _split_exp(x, bind)
    # 2**n in two factors, each of which is a normal number.
    half = bind(n >> _like(n, 1, "int32"))
    return bind(p * _power_of_2(half) * _power_of_2(n - half))


def _normal_exp(x, bind: Callable):
    """Return e to the power of an x in [-87, 88], whose results are normal numbers, or of NaN."""
    p, n = _split_exp(x, bind)
    return bind(p * _power_of_2(n))


def _split_exp(x, bind: Callable) -> tuple:
    """Return p and an int32 n such that e to the power of x is ``p * 2**n``."""
    shifted = bind(x * _like(x, math.log2(math.e)) + _like(x, _MAGIC))
    n = bind(_as(shifted, "int32") - _like(x, _MAGIC_BITS, "int32"))
    # Not by a subtraction, which TVM would simplify away.
    rounded = bind(tirx.Cast(x.ty.dtype, n))
    r = bind(x - rounded * _like(x, _LOG2_HIGH))
    r = bind(r - rounded * _like(x, _LOG2_LOW))
    p = _polynomial(
        r,
        [
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ],
        bind,
    )
    p = p * (r * r) + r + _like(r, 1.0)
    return p, n


def erf(x, bind: Callable = emit_bind):
    """Return the error function of x, within 4e-7: a quotient of polynomials, those of Eigen."""
    # In this order, a NaN passes both comparisons. Beyond, the result is 1.
    x = bind(tirx.Min(_like(x, _ERF_END), tirx.Max(_like(x, -_ERF_END), x)))
    s = bind(x * x)
    numerator = _polynomial(
        s,
        [
            2.2905065861350646e-4,
            3.4082910107109506e-3,
            5.0955695062380861e-2,
            1.8520832239976145e-1,
            1.128379143519084,
        ],
        bind,
    )
    denominator = _polynomial(
        s,
        [
            -1.1791602954361697e-7,
            2.3547966471313185e-5,
            1.0179625278914885e-3,
            1.4070470171167667e-2,
            1.1098505178285362e-1,
            4.9746925110067538e-1,
            1.0,
        ],
        bind,
    )
    result = bind(x * numerator / denominator)
    return bind(tirx.Min(_like(x, 1.0), tirx.Max(_like(x, -1.0), result)))


def tanh(x, bind: Callable = emit_bind):
    """Return the hyperbolic tangent of x, within 2 units in the last place: near 0 Cephes' polynomial."""
    a = bind(_magnitude(x))
    # Beyond 10 it is 1.
    t = bind(tirx.Min(_like(a, 20.0), a + a))
    far = bind(_like(x, 1.0) - _like(x, 2.0) / (_normal_exp(t, bind) + _like(x, 1.0)))
    far = _with_sign(far, x)
    s = bind(x * x)
    near = _polynomial(
        s,
        [
            -5.70498872745e-3,
            2.06390887954e-2,
            -5.37397155531e-2,
            1.33314422036e-1,
            -3.33332819422e-1,
        ],
        bind,
    )
    return bind(tirx.Select(a > _like(a, 0.625), far, near * s * x + x))


def sigmoid(x, bind: Callable = emit_bind):
    """Return ``1 / (1 + exp(-x))``; 0 where the exponential is infinite."""
    return bind(_like(x, 1.0) / (_like(x, 1.0) + exp(bind(_like(x, 0.0) - x), bind)))


def _polynomial(x, coefficients: Sequence[float], bind: Callable):
    """Return a polynomial, given its coefficients from that of the highest power on.

    Neighbours are added up first, as G. Estrin did: a processor that has several additions under way waits for
    each of a chain of them.
    """
    terms = [_like(x, coefficient) for coefficient in reversed(coefficients)]
    while len(terms) > 1:
        pairs = list(zip(terms[::2], terms[1::2], strict=False))
        terms = [bind(high * x + low) for low, high in pairs] + terms[2 * len(pairs) :]
        if len(terms) > 1:
            x = bind(x * x)
    return terms[0]


def _like(x, value: float, dtype: str = "float32"):
    """Return a constant of as many lanes as a value has."""
    constant = tirx.const(value, dtype)
    return constant if _lanes(x) == 1 else tirx.Broadcast(constant, _lanes(x))


def _lanes(x) -> int:
    return int(str(x.ty.dtype).partition("x")[2] or 1)


def _as(x, dtype: str):
    """Return the bits of a value as another dtype of 32 bits."""
    return tirx.reinterpret(dtype if _lanes(x) == 1 else f"{dtype}x{_lanes(x)}", x)


def _magnitude(x):
    return _as(_as(x, "int32") & _like(x, 0x7FFFFFFF, "int32"), "float32")


def _with_sign(magnitude, x):
    """Return a number that is not negative with the sign of another."""
    sign = _as(x, "int32") & _like(x, -(2**31), "int32")
    return _as(_as(magnitude, "int32") | sign, "float32")


def _power_of_2(n):
    """Return 2**n for int32 exponents of normal numbers."""
    return _as((n + _like(n, 127, "int32")) << _like(n, 23, "int32"), "float32")
