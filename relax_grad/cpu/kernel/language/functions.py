"""Elementary functions of float32 as polynomials, for scalars and vectors.

For LLVM's own functions, the C library is called for each lane of a vector. These have no calls, no
branches and no tables. They also have few conditions, because TVM's simplifier expands all operands
of a condition. Each function takes ``bind``, which binds a value that is used more than once to a
variable: kernels emit a statement for it, and :func:`expression` builds one expression with
``Let``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx

from .builder import bind as emit_bind

#: 1.5 * 2**23: its sum with a small float32 has that number, rounded to an integer, in its lowest
#: bits.
_MAGIC, _MAGIC_BITS = 12582912.0, 0x4B400000

#: log(2) in two parts. The first has so few bits that its product with an exponent is exact.
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.12194440e-4

#: The bits of the square root of 1/2.
_ROOT_BITS = 0x3F3504F3

#: The bits of infinity, of a NaN, and of 1.
_INFINITY, _NAN, _ONE = 0x7F800000, 0x7FC00000, 0x3F800000

#: The factor that undoes the scaling of :func:`raised`.
LOWERED = 2.0**-64

#: The biases of the exponents of float32, and of the exponents in :func:`raised`.
_BIAS = 127
RAISED = _BIAS + 64

#: ``(exp(r) - 1 - r) / r**2`` for r between -log(2) / 2 and log(2) / 2, as a minimax polynomial,
#: from the highest power down; ``exp(r)`` then is within 3.1e-9.
EXPM1 = (
    1.3814540077565062e-3,
    8.368745212762473e-3,
    4.1668390792987675e-2,
    1.6666520398167745e-1,
    4.999999343206654e-1,
)

#: The argument from which on :func:`erf` is less than an ulp below 1.
_ERF_END = 3.85


def expression(function: Callable, *arguments: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the application of a function as one expression.

    Parameters
    ----------
    function : Callable
        One of the functions of this module.
    arguments : tirx.PrimExpr
        Its arguments.
    """
    names: list[tuple[tirx.Var, tirx.PrimExpr]] = []

    def bind(value: tirx.PrimExpr) -> tirx.PrimExpr:
        names.append((tirx.Var(f"t{len(names)}", value.ty.dtype), value))
        return names[-1][0]

    result = function(*map(bind, arguments), bind)
    for name, value in reversed(names):
        result = tirx.Let(name, value, result)
    return result


def exp(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return e to the power of x, within 1 unit in the last place.

    With ``x = n * log(2) + r`` it is ``2**n`` times a polynomial in r. Subnormal results, infinity
    and NaN are correct too.
    """
    # With the operands in this order, a NaN propagates.
    x = bind(tirx.Min(like(x, 89.0), tirx.Max(like(x, -104.0), x)))
    n, r = reduced(x, bind, 2 * _BIAS)
    half = rounded_parts(x * like(x, math.log2(math.e) / 2.0), bind, _BIAS)[1]
    return bind(small_exp(r, bind) * power_of_2(half) * power_of_2(n - half))


def exp_or_0(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return e to the power of x for x up to 88, within 1 unit in the last place; it is 0 for most
    subnormal results.

    It is cheaper than :func:`exp`. NaN and minus infinity are correct too.
    """
    # 2**-127 has the bits of 0. With the operands in this order, a NaN propagates.
    return _normal_exp(bind(tirx.Max(like(x, -88.0), x)), bind)


def _normal_exp(x: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return e to the power of x, for NaN and for x in [-87, 88], where the results are normal
    numbers."""
    n, r = reduced(x, bind, _BIAS)
    return bind(small_exp(r, bind) * power_of_2(n))


def split_exp(x: tirx.PrimExpr, bind: Callable) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """Return p and an int32 n such that e to the power of x is ``p * 2**n``, for :func:`raised`."""
    n, r = reduced(x, bind, RAISED)
    return small_exp(r, bind), n


def reduced(x: tirx.PrimExpr, bind: Callable, bias: int = 0) -> tuple:
    """Return an int32 n and a small r such that x is ``n * log(2) + r``; ``n + bias`` is the
    cheapest sum."""
    rounded, n = rounded_parts(x * like(x, math.log2(math.e)), bind, bias)
    r = bind(x - rounded * like(x, LOG2_HIGH))
    return n, bind(r - rounded * like(x, LOG2_LOW))


def split_exp2(t: tirx.PrimExpr, bind: Callable) -> tuple:
    """Return p and an int32 n such that 2 to the power of a float64 t is ``(1 + p) * 2**n``, for
    :func:`raised`."""
    n = rounded_parts(bind(narrowed(t)), bind, RAISED)[1]
    r = (t - widened(n)) * like(t, math.log(2), "float64")
    return bind(small_expm1(bind(narrowed(r)), bind)), n


def small_exp(r: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return e to the power of r, for r between -log(2) / 2 and log(2) / 2."""
    return horner(r, (*EXPM1, 1.0, 1.0), bind)


def small_expm1(r: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return ``exp(r) - 1`` for r between -log(2) / 2 and log(2) / 2."""
    p = polynomial(r, EXPM1, bind)
    return p * (r * r) + r


def log(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the natural logarithm of x, within 1 unit in the last place."""
    m, e = _split(x, bind)
    result = as_bits(_log_of_parts(bind(m - like(m, 1.0)), e, bind), "int32")
    bits = bind(as_bits(x, "int32"))
    size = bind(_without_sign(bits))
    result = _chosen(_exceeds(size, _INFINITY - 1), bits, result, bind)
    result = _chosen(_is_negative(bits), like(x, _NAN, "int32"), result, bind)
    infinite = like(x, _INFINITY - 2**31, "int32")
    return bind(as_bits(_chosen(_is_0(size), infinite, result, bind), "float32"))


def log_of_normal(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the natural logarithm of a positive normal number, of infinity or of NaN.

    It is cheaper than :func:`log`.
    """
    m, e = _normal_parts(bind(as_bits(x, "int32")), bind)
    result = _log_of_parts(bind(m - like(m, 1.0)), e, bind)
    return bind(tirx.Select(x < like(x, float("inf")), result, x))


def _log_of_parts(f: tirx.PrimExpr, e: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return the natural logarithm of ``(1 + f) * 2**e``: Cephes' logf."""
    s = bind(f * f)
    p = polynomial(
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
    p = bind(p * s * f + e * like(f, LOG2_LOW) - s * like(f, 0.5))
    return bind(f + p + e * like(f, LOG2_HIGH))


def power(x: tirx.PrimExpr, y: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return x to the power of y, within 2 units in the last place; special cases follow C's
    pow.

    It is ``2**(y * log2(abs(x)))`` with the exponent in float64: in float32, an exponent of 100
    would lose 7 bits.
    """
    m, e = _split(x, bind)
    wide = bind(widened(m))
    s = bind((wide - like(x, 1.0, "float64")) / (wide + like(x, 1.0, "float64")))
    # 2 / log(2) * (s + s**3 / 3 + s**5 / 5 + ...)
    series = polynomial(
        bind(s * s), [2.0 / math.log(2) / n for n in (13, 11, 9, 7, 5, 3, 1)], bind, "float64"
    )
    logarithm = bind(widened(e) + s * series)
    # Finite, so that 0 times it is 0.
    finite = bind(tirx.Min(like(x, 3e38), tirx.Max(like(x, -3e38), y)))
    t = bind(widened(finite) * logarithm)
    t = bind(tirx.Min(like(x, 140.0, "float64"), tirx.Max(like(x, -160.0, "float64"), t)))
    p, n = split_exp2(t, bind)
    return _at_the_edges(x, y, scaled(p + like(x, 1.0), n, bind), bind)


def _at_the_edges(
    x: tirx.PrimExpr, y: tirx.PrimExpr, positive: tirx.PrimExpr, bind: Callable
) -> tirx.PrimExpr:
    """Return x to the power of y with the special cases, given the power for a positive, finite
    x."""
    base, exponent = bind(as_bits(x, "int32")), bind(as_bits(y, "int32"))
    size, exponent_size = bind(_without_sign(base)), bind(_without_sign(exponent))
    is_large = bind(_exceeds(size, _INFINITY - 1))
    is_extreme = bind(is_large | _is_0(size))
    # For x = 0 and infinity, the power is 0 or infinity, depending on the sign of the exponent.
    extreme = like(x, _INFINITY, "int32") & (_is_negative(exponent) ^ is_large)
    result = _chosen(is_extreme, extreme, as_bits(positive, "int32"), bind)
    whole = bind(tirx.floor(y))
    halves = bind(tirx.floor(y * like(y, 0.5)))
    is_fraction = bind(_differ(as_bits(whole, "int32"), exponent, bind))
    is_odd = _differ(as_bits(halves + halves, "int32"), exponent, bind)
    sign = base & like(x, -(2**31), "int32")
    result = bind(_chosen(is_fraction, result, result | (sign & is_odd), bind))
    nan, one = like(x, _NAN, "int32"), like(x, _ONE, "int32")
    is_no_number = _is_negative(base) & is_fraction
    is_no_number = _chosen(is_extreme, like(x, 0, "int32"), is_no_number, bind)
    is_no_number = is_no_number | _exceeds(size, _INFINITY) | _exceeds(exponent_size, _INFINITY)
    result = _chosen(is_no_number, nan, result, bind)
    differs = bind(_differ(base, one, bind))
    result = _chosen(differs, result, one, bind)
    return bind(as_bits(_chosen(_is_0(exponent_size), one, result, bind), "float32"))


def _chosen(
    mask: tirx.PrimExpr, first: tirx.PrimExpr, second: tirx.PrimExpr, bind: Callable
) -> tirx.PrimExpr:
    """Return the int32 that a mask selects: the first if it is all ones, the second if it is all
    zeros.

    It avoids a condition, in whose branches TVM would simplify everything again.
    """
    second = bind(second)
    return bind(second ^ ((first ^ second) & mask))


def _is_negative(n: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the mask of negative numbers."""
    return tirx.Max(like(n, -1, "int32"), tirx.Min(like(n, 0, "int32"), n))


def _without_sign(bits: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return bits without the sign bit; not by a mask of the others, which TVM 0.26 turns into a
    remainder by 2**31."""
    return bits ^ (bits & like(bits, -(2**31), "int32"))


def _exceeds(n: tirx.PrimExpr, limit: int) -> tirx.PrimExpr:
    """Return the mask of the numbers that exceed a limit, among non-negative ones."""
    return _is_negative(like(n, limit, "int32") - n)


def _is_0(n: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the mask of zeros, among non-negative numbers."""
    return _is_negative(n - like(n, 1, "int32"))


def _differ(a: tirx.PrimExpr, b: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return the mask of inequality of two bit patterns."""
    bits = bind(a ^ b)
    return _is_negative(bits | (like(a, 0, "int32") - bits))


def erf(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the error function of x, within 4 units in the last place; beyond 3.86 it is 1 or -1.

    It is the sum of ``x / 4``, which is exact, and of x times a quotient of polynomials of its
    square. Beyond ``_ERF_END``, the argument of the quotient is clamped; the sum then grows with x,
    and is clamped to 1.
    """
    # With the operands in this order, a NaN propagates.
    s = bind(tirx.Min(like(x, _ERF_END**2), x * x))
    numerator = polynomial(
        s,
        [
            -7.57468069e-6,
            -7.01515319e-7,
            -2.22828712e-5,
            2.41974778e-2,
            6.29349202e-2,
            8.78379166e-1,
        ],
        bind,
    )
    denominator = polynomial(
        s,
        [
            3.87318032e-5,
            1.14550465e-3,
            1.47849377e-2,
            1.13129191e-1,
            4.99853402e-1,
            1.0,
        ],
        bind,
    )
    result = bind(x * (numerator / denominator) + x * like(x, 0.25))
    return bind(tirx.Min(like(x, 1.0), tirx.Max(like(x, -1.0), result)))


def tanh(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the hyperbolic tangent of x, within 2 units in the last place; near 0 by Cephes'
    polynomial."""
    a = bind(magnitude(x))
    # Beyond 10 it is 1.
    t = bind(tirx.Min(like(a, 20.0), a + a))
    far = bind(like(x, 1.0) - like(x, 2.0) / (_normal_exp(t, bind) + like(x, 1.0)))
    far = _with_sign(far, x)
    s = bind(x * x)
    near = polynomial(
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
    return bind(tirx.Select(a > like(a, 0.625), far, near * s * x + x))


def sigmoid(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return ``1 / (1 + exp(-x))``, within 3 units in the last place.

    For a negative x it is computed as ``exp(x) / (1 + exp(x))``, whose exponential does not
    overflow.
    """
    p, n = split_exp(bind(tirx.Max(like(x, -110.0), like(x, 0.0) - magnitude(x))), bind)
    e = bind(raised(p, n, bind) * like(x, LOWERED))
    share = bind(like(x, 1.0) / (like(x, 1.0) + e))
    return bind(tirx.Select(x < like(x, 0.0), e * share, share))


def expm1(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return ``exp(x) - 1``, within 2 units in the last place, also for small x, where it is about
    x."""
    # With the operands in this order, a NaN propagates.
    x = bind(tirx.Min(like(x, 89.0), tirx.Max(like(x, -104.0), x)))
    n, r = reduced(x, bind)
    n, p = bind(n), bind(small_expm1(r, bind))
    half = bind(n >> like(n, 1, "int32"))
    rest = bind(n - half)
    difference = power_of_2(half) - power_of_2(like(n, 0, "int32") - rest)
    return bind((p * power_of_2(half) + difference) * power_of_2(rest))


def log1p(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return ``log(1 + x)``, within 2 units in the last place, for x from 0 to 2**126 and NaN, also
    for small x."""
    bits = bind(as_bits(bind(x + like(x, 1.0)), "int32"))
    n = bind((bits - like(bits, _ROOT_BITS, "int32")) >> like(bits, 23, "int32"))
    scale = bind(power_of_2(like(n, 0, "int32") - n))
    # This keeps the part of x that the sum with 1 loses by rounding.
    f = bind(x * scale + (scale - like(x, 1.0)))
    return _log_of_parts(f, bind(tirx.Cast(x.ty.dtype, n)), bind)


def atanh(x: tirx.PrimExpr, bind: Callable = emit_bind) -> tirx.PrimExpr:
    """Return the inverse of the hyperbolic tangent of x, within 3 units in the last place."""
    a = bind(magnitude(x))
    half = bind(like(x, 0.5) * log1p(bind((a + a) / (like(x, 1.0) - a)), bind))
    ended = tirx.Select(tirx.EQ(a, like(x, 1.0)), like(x, float("inf")), like(x, float("nan")))
    return bind(_with_sign(bind(tirx.Select(a < like(x, 1.0), half, ended)), x))


def _split(x: tirx.PrimExpr, bind: Callable) -> tuple:
    """Return m between sqrt(1/2) and sqrt(2), and e, such that ``m * 2**e`` is the magnitude of a
    finite x."""
    size = bind(_without_sign(bind(as_bits(x, "int32"))))
    # Subnormal numbers and 0 are multiplied by 2**25.
    shift = bind(_is_negative(size - like(x, 1 << 23, "int32")))
    shift = bind(shift & like(x, 25, "int32"))
    bits = bind(as_bits(as_bits(size, "float32") * power_of_2(shift), "int32"))
    m, e = _normal_parts(bits, bind)
    return m, bind(e - tirx.Cast(x.ty.dtype, shift))


def _normal_parts(bits: tirx.PrimExpr, bind: Callable) -> tuple:
    """Return m and e, like :func:`_split`, from the bits of a positive normal number."""
    # The exponent for a significand m of at least sqrt(1/2), and that significand.
    e = bind((bits - like(bits, _ROOT_BITS, "int32")) >> like(bits, 23, "int32"))
    m = bind(as_bits(bits - (e << like(bits, 23, "int32")), "float32"))
    return m, bind(tirx.Cast(m.ty.dtype, e))


def rounded_parts(x: tirx.PrimExpr, bind: Callable, bias: int = 0) -> tuple:
    """Return the integer nearest to a small x, as a float32 and as an int32 n; ``n + bias`` is the
    cheapest sum."""
    magic = _MAGIC + bias
    bits = bind(as_bits(bind(x + like(x, magic)), "int32"))
    # From the bits: TVM would simplify the difference of the sum and a number of it.
    rounded = bind(as_bits(bits, "float32") - like(x, magic))
    return rounded, bits - like(x, _MAGIC_BITS + bias, "int32")


def widened(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a number as a float64."""
    return tirx.Cast(str(like(x, 0.0, "float64").ty.dtype), x)


def narrowed(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a float64 as a float32."""
    return tirx.Cast(str(like(x, 0.0).ty.dtype), x)


def polynomial(
    x: tirx.PrimExpr, coefficients: Sequence[float], bind: Callable, dtype: str = "float32"
) -> tirx.PrimExpr:
    """Return a polynomial of x, given its coefficients from the highest power down.

    Neighbouring terms are combined first, so that several additions overlap, and then by the square
    of x: up to 6 terms take as many steps as in Estrin's scheme, without its higher powers.
    """
    terms = [like(x, coefficient, dtype) for coefficient in reversed(coefficients)]
    pairs = zip(terms[::2], terms[1::2], strict=False)
    odd = terms[2 * (len(terms) // 2) :]
    *rest, total = [bind(high * x + low) for low, high in pairs] + odd
    if rest:
        square = bind(x * x)
    for term in reversed(rest):
        total = bind(total * square + term)
    return total


def horner(x: tirx.PrimExpr, coefficients: Sequence[float], bind: Callable) -> tirx.PrimExpr:
    """Return a polynomial of x like :func:`polynomial`, one term after the other.

    It has the fewest instructions, but each waits for the one before: for loops of many short
    iterations, which overlap.
    """
    total = like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = bind(total * x + like(x, coefficient))
    return total


def like(x: tirx.PrimExpr, value: float, dtype: str = "float32") -> tirx.PrimExpr:
    """Return a constant with the number of lanes of x."""
    constant = tirx.const(value, dtype)
    return constant if _lanes(x) == 1 else tirx.Broadcast(constant, _lanes(x))


def _lanes(x: tirx.PrimExpr) -> int:
    return int(str(x.ty.dtype).partition("x")[2] or 1)


def as_bits(x: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """Return the bits of a value as another dtype of 32 bits."""
    return tirx.reinterpret(dtype if _lanes(x) == 1 else f"{dtype}x{_lanes(x)}", x)


def magnitude(x: tirx.PrimExpr) -> tirx.PrimExpr:
    return as_bits(as_bits(x, "int32") & like(x, 0x7FFFFFFF, "int32"), "float32")


def _with_sign(magnitude: tirx.PrimExpr, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a non-negative number with the sign of x."""
    sign = as_bits(x, "int32") & like(x, -(2**31), "int32")
    return as_bits(as_bits(magnitude, "int32") | sign, "float32")


def scaled(p: tirx.PrimExpr, n: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return ``p * 2**n``, which may be subnormal, by two factors that are normal numbers."""
    half = bind(n >> like(n, 1, "int32"))
    return bind(p * power_of_2(half) * power_of_2(n - half))


def raised(p: tirx.PrimExpr, n: tirx.PrimExpr, bind: Callable) -> tirx.PrimExpr:
    """Return ``p * 2**n / LOWERED`` for n between -190 and 63: a normal number even if ``p * 2**n``
    is not."""
    return bind(p * power_of_2(n + like(n, RAISED - _BIAS, "int32")))


def power_of_2(n: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return 2**n for an int32 n in the range of the exponents of normal numbers."""
    return as_bits((n + like(n, _BIAS, "int32")) << like(n, 23, "int32"), "float32")
