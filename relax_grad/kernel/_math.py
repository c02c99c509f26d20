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

#: ``log(erfc(t)) / t``, from the highest power on.
_TAIL = (
    -3.14416385e-05,
    3.08812142e-04,
    -1.03242765e-03,
    -5.36900038e-04,
    1.95839383e-02,
    -1.02919606e-01,
    -6.36597734e-01,
    -1.12838025e00,
)

#: Where :func:`normal_tail` begins to be 0.
_TAIL_END = 9.5


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
    """Return the error function of x, within 2 units in the last place.

    Near 0 a polynomial, elsewhere ``1 - exp(p(|x|))`` (N. Juffa, "Efficient implementation of erff").
    """
    a = bind(_magnitude(x))
    s = bind(x * x)
    # Beyond 4 it is 1.
    t = bind(tirx.Min(_like(a, 4.0), a))
    far = _polynomial(
        t,
        [
            -1.72853470e-5,
            3.83197126e-4,
            -3.88396438e-3,
            2.42546219e-2,
            -1.06777877e-1,
            -6.34846687e-1,
            -1.28717512e-1,
        ],
        bind,
    )
    far = bind(_like(t, 1.0) - _normal_exp(bind(far * t - t), bind))
    far = _with_sign(far, x)
    near = _polynomial(
        s,
        [
            -5.96761703e-4,
            4.99119423e-3,
            -2.67681349e-2,
            1.12819925e-1,
            -3.76125336e-1,
            1.28379166e-1,
        ],
        bind,
    )
    return bind(tirx.Select(a > _like(a, 0.927734375), far, near * x + x))


def normal_tail(x, bind: Callable = emit_bind):
    """Return the probability that a normally distributed number is above ``|x|``, for 0 at most 1e-7 off.

    It is ``exp(p(|x|)) / 2`` with the polynomial whose largest error over [0, 5.7] is smallest: 8e-9.
    """
    size = bind(_magnitude(x))
    # Beyond, the exponential is not a normal number.
    a = bind(tirx.Min(_like(x, _TAIL_END), size))
    # Of t = |x| / sqrt(2), with the root in the coefficients, and with log(1 / 2).
    powers = [c * math.sqrt(0.5) ** (8 - i) for i, c in enumerate(_TAIL)]
    p = bind(_polynomial(a, powers, bind) * a + _like(x, -math.log(2.0)))
    return bind(tirx.Select(size > _like(x, _TAIL_END), _like(x, 0.0), _normal_exp(p, bind)))


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
