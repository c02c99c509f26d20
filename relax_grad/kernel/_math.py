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

#: The bits of the root of 1/2.
_ROOT_BITS = 0x3F3504F3

#: The bits of infinity, of a NaN, and of 1.
_INFINITY, _NAN, _ONE = 0x7F800000, 0x7FC00000, 0x3F800000

#: Where :func:`erf` begins to be 1.
_ERF_END = 3.832506856900711


def expression(function: Callable, *arguments: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a function of values as one expression.

    Parameters
    ----------
    function : Callable
        One of the functions here.
    arguments : tirx.PrimExpr
        What it takes.
    """
    names = []

    def bind(value):
        names.append((tirx.Var(f"t{len(names)}", value.ty.dtype), value))
        return names[-1][0]

    result = function(*map(bind, arguments), bind)
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
    n = _rounded(x * _like(x, math.log2(math.e)), bind)
    # Not by a subtraction, which TVM would simplify away.
    rounded = bind(tirx.Cast(x.ty.dtype, n))
    r = bind(x - rounded * _like(x, _LOG2_HIGH))
    r = bind(r - rounded * _like(x, _LOG2_LOW))
    return _small_exp(r, bind), n


def _small_exp(r, bind: Callable):
    """Return e to the power of an r between -log(2) / 2 and log(2) / 2."""
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
    return p * (r * r) + r + _like(r, 1.0)


def log(x, bind: Callable = emit_bind):
    """Return the natural logarithm of x, within 1 unit in the last place."""
    result = _as(_log_of_parts(*_split(x, bind), bind), "int32")
    bits = bind(_as(x, "int32"))
    size = bind(_without_sign(bits))
    result = _chosen(_exceeds(size, _INFINITY - 1), bits, result, bind)
    result = _chosen(_is_negative(bits), _like(x, _NAN, "int32"), result, bind)
    infinite = _like(x, _INFINITY - 2**31, "int32")
    return bind(_as(_chosen(_is_0(size), infinite, result, bind), "float32"))


def log_of_normal(x, bind: Callable = emit_bind):
    """Return the natural logarithm of a positive normal number, of infinity or of NaN.

    It is less to compute than :func:`log`.
    """
    result = _log_of_parts(*_normal_parts(bind(_as(x, "int32")), bind), bind)
    return bind(tirx.Select(x < _like(x, float("inf")), result, x))


def _log_of_parts(m, e, bind: Callable):
    """Return the natural logarithm of ``m * 2**e``: Cephes' logf."""
    f = bind(m - _like(m, 1.0))
    s = bind(f * f)
    p = _polynomial(
        f,
        [
            7.0376836292e-2,
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        ],
        bind,
    )
    p = bind(p * s * f + e * _like(m, _LOG2_LOW) - s * _like(m, 0.5))
    return bind(f + p + e * _like(m, _LOG2_HIGH))


def power(x, y, bind: Callable = emit_bind):
    """Return x to the power of y, within 2 units in the last place, and at the edges what C's pow returns.

    It is ``2**(y * log2(abs(x)))``, the exponent in float64: a float32 of 100 would have lost 7 bits.
    """
    m, e = _split(x, bind)
    wide = bind(_wide(m))
    s = bind((wide - _like(x, 1.0, "float64")) / (wide + _like(x, 1.0, "float64")))
    # 2 / log(2) * (s + s**3 / 3 + s**5 / 5 + ...)
    series = _polynomial(
        bind(s * s), [2.0 / math.log(2) / n for n in (13, 11, 9, 7, 5, 3, 1)], bind, "float64"
    )
    logarithm = bind(_wide(e) + s * series)
    # Finite, so that 0 times it is 0.
    finite = bind(tirx.Min(_like(x, 3e38), tirx.Max(_like(x, -3e38), y)))
    t = bind(_wide(finite) * logarithm)
    t = bind(tirx.Min(_like(x, 140.0, "float64"), tirx.Max(_like(x, -160.0, "float64"), t)))
    n = _rounded(tirx.Cast(x.ty.dtype, t), bind)
    r = (t - tirx.Cast(_wide_dtype(x), n)) * _like(x, math.log(2), "float64")
    p = _small_exp(bind(tirx.Cast(x.ty.dtype, r)), bind)
    half = bind(n >> _like(n, 1, "int32"))
    return _at_the_edges(x, y, p * _power_of_2(half) * _power_of_2(n - half), bind)


def _at_the_edges(x, y, magnitude, bind: Callable):
    """Return a power of any x and y, given that of a positive, finite x."""
    base, exponent = bind(_as(x, "int32")), bind(_as(y, "int32"))
    size, exponent_size = bind(_without_sign(base)), bind(_without_sign(exponent))
    is_large = bind(_exceeds(size, _INFINITY - 1))
    is_extreme = bind(is_large | _is_0(size))
    # Of 0 and infinity, it is one of these, as the exponent's sign says.
    extreme = _like(x, _INFINITY, "int32") & (_is_negative(exponent) ^ is_large)
    result = _chosen(is_extreme, extreme, _as(magnitude, "int32"), bind)
    whole = bind(tirx.floor(y))
    halves = bind(tirx.floor(y * _like(y, 0.5)))
    is_fraction = bind(_differ(_as(whole, "int32"), exponent, bind))
    is_odd = _differ(_as(halves + halves, "int32"), exponent, bind)
    sign = base & _like(x, -(2**31), "int32")
    result = bind(_chosen(is_fraction, result, result | (sign & is_odd), bind))
    nan, one = _like(x, _NAN, "int32"), _like(x, _ONE, "int32")
    is_no_number = _is_negative(base) & is_fraction
    is_no_number = _chosen(is_extreme, _like(x, 0, "int32"), is_no_number, bind)
    is_no_number = is_no_number | _exceeds(size, _INFINITY) | _exceeds(exponent_size, _INFINITY)
    result = _chosen(is_no_number, nan, result, bind)
    differs = bind(_differ(base, one, bind))
    result = _chosen(differs, result, one, bind)
    return bind(_as(_chosen(_is_0(exponent_size), one, result, bind), "float32"))


def _chosen(mask, first, second, bind: Callable):
    """Return the int32 that a mask, all ones or all zeros, chooses: the first of ones.

    Not a condition, in whose branches TVM would simplify all over again.
    """
    second = bind(second)
    return bind(second ^ ((first ^ second) & mask))


def _is_negative(n):
    """Return the mask of negative numbers."""
    return tirx.Max(_like(n, -1, "int32"), tirx.Min(_like(n, 0, "int32"), n))


def _without_sign(bits):
    """Return bits without the first, not by a mask of the others: TVM 0.26 makes a remainder by 2**31 of that."""
    return bits ^ (bits & _like(bits, -(2**31), "int32"))


def _exceeds(n, limit: int):
    """Return the mask of numbers that are not negative and exceed a limit."""
    return _is_negative(_like(n, limit, "int32") - n)


def _is_0(n):
    """Return the mask of 0 among numbers that are not negative."""
    return _is_negative(n - _like(n, 1, "int32"))


def _differ(a, b, bind: Callable):
    """Return the mask of bits that differ, in more than the sign."""
    bits = bind(a ^ b)
    return _is_negative(bits | (_like(a, 0, "int32") - bits))


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


def _split(x, bind: Callable) -> tuple:
    """Return m between the roots of 1/2 and 2, and e such that ``m * 2**e`` is the magnitude of a finite x."""
    size = bind(_without_sign(bind(_as(x, "int32"))))
    # What is not a normal number is multiplied with 2**25.
    shift = bind(_is_negative(size - _like(x, 1 << 23, "int32")))
    shift = bind(shift & _like(x, 25, "int32"))
    bits = bind(_as(_as(size, "float32") * _power_of_2(shift), "int32"))
    m, e = _normal_parts(bits, bind)
    return m, bind(e - tirx.Cast(x.ty.dtype, shift))


def _normal_parts(bits, bind: Callable) -> tuple:
    """Return m and e, as :func:`_split` does, of the bits of a positive normal number."""
    # The exponent of what is at least the root of 1/2, and what is left.
    e = bind((bits - _like(bits, _ROOT_BITS, "int32")) >> _like(bits, 23, "int32"))
    m = bind(_as(bits - (e << _like(bits, 23, "int32")), "float32"))
    return m, bind(tirx.Cast(m.ty.dtype, e))


def _rounded(x, bind: Callable):
    """Return the integer, an int32, that is next to a small x."""
    shifted = bind(x + _like(x, _MAGIC))
    return bind(_as(shifted, "int32") - _like(x, _MAGIC_BITS, "int32"))


def _wide_dtype(x) -> str:
    return "float64" if _lanes(x) == 1 else f"float64x{_lanes(x)}"


def _wide(x):
    return tirx.Cast(_wide_dtype(x), x)


def _polynomial(x, coefficients: Sequence[float], bind: Callable, dtype: str = "float32"):
    """Return a polynomial, given its coefficients from that of the highest power on.

    Neighbours are added up first, as G. Estrin did: a processor that has several additions under way waits for
    each of a chain of them.
    """
    terms = [_like(x, coefficient, dtype) for coefficient in reversed(coefficients)]
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
