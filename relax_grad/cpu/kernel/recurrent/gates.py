"""The sigmoid and the hyperbolic tangent of the gates of recurrent layers, for vectors.

They need half the operations of :mod:`..language.functions`: no conditions, no results below the
normal numbers, and log(2) in one part. The error of the last one grows with the magnitude of the
argument, as the rounding of the argument itself does.
"""

from __future__ import annotations

import math

from tvm import tirx

from ..language import builder as b
from ..language.builder import Vectors, bind, const
from ..language.functions import EXPM1, as_bits, horner, like

#: 1.5 * 2**23: its sum with a small float32 has that number, rounded to an integer, in its lowest
#: bits.
_MAGIC = 12582912.0

#: The bits of 1, and the number of bits below the exponent.
_ONE, _FRACTION = 0x3F800000, 23

#: The magnitudes of arguments beyond which the sigmoid is the least normal number or 1, and the
#: hyperbolic tangent is -1 or 1.
_END_OF_SIGMOID, _END_OF_TANH = 87.0, 9.5


def sigmoid(vectors: Vectors, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return ``1 / (1 + exp(-x))``; clamped below x = -87, at 1.6e-38.

    It is within 3 units in the last place, and ``abs(x)`` / 16 more; without fused multiply-add
    instructions, ``abs(x)`` more.
    """
    x = _clamped(x, _END_OF_SIGMOID)
    p, power = _exp_parts(vectors, x, -1.0)
    return _reciprocal(vectors, _held(vectors, (p + like(x, 1.0)) * power + like(x, 1.0)))


def tanh(vectors: Vectors, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the hyperbolic tangent of x, within 4 units in the last place, and at most 1.

    It is ``e / (e + 2)`` with ``e = exp(2 * x) - 1``, which loses no bits near 0.
    """
    x = _clamped(x, _END_OF_TANH)
    p, power = _exp_parts(vectors, x, 2.0)
    e = _held(vectors, p * power + (power - like(x, 1.0)))
    return _held(vectors, e * _reciprocal(vectors, bind(e + like(x, 2.0))))


def _clamped(x: tirx.PrimExpr, end: float) -> tirx.PrimExpr:
    # With the operands in this order, a NaN propagates.
    return bind(tirx.Min(like(x, end), tirx.Max(like(x, -end), x)))


def _exp_parts(
    vectors: Vectors, x: tirx.PrimExpr, factor: float
) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """Return p and a power of 2 such that ``exp(factor * x)`` is ``(1 + p) * power``."""
    # TVM's simplifier would undo the sum.
    shifted = _held(vectors, x * like(x, factor * math.log2(math.e)) + like(x, _MAGIC))
    n = bind(shifted - like(x, _MAGIC))
    r = bind(x * like(x, factor) - n * like(x, math.log(2)))
    total = horner(r, (*EXPM1, 1.0), bind)
    bits = as_bits(shifted, "int32") << like(x, _FRACTION, "int32")
    return bind(total * r), bind(as_bits(bits + like(x, _ONE, "int32"), "float32"))


def _reciprocal(vectors: Vectors, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return ``1 / x`` for a positive normal x with a normal result, within 1 unit in the last
    place."""
    if vectors.lanes != 16:
        return _held(vectors, like(x, 1.0) / x)
    # The estimate of AVX-512 has 14 bits; a step of Newton's method doubles them.
    mask, zero = tirx.const(-1, "int16"), like(x, 0.0)
    name = "llvm.x86.avx512.rcp14.ps.512"
    about = _held(vectors, tirx.call_llvm_pure_intrin(x.ty.dtype, name, x, zero, mask))
    rest = bind(like(x, 1.0) - x * about)
    return _held(vectors, about * rest + about)


def _held(vectors: Vectors, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a vector by way of a buffer, which LLVM keeps in a register.

    TVM's simplifier visits the value of a variable again at each of its uses.
    """
    row = b.scratch(vectors.lanes)
    vectors.store(row, const(0), value)
    return bind(vectors.load(row, const(0)))
