"""Casts between integers that TVM folds as C computes them: the result is the operand modulo a power of two.

TVM raises an error where it folds the cast of a constant that the other dtype does not hold, -3 to uint8 or 300 to
int8. Fusion makes such casts: the constant that one nest stores goes into the cast that another nest makes of it.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from ._dependence import loads

#: The signed dtypes that remainders are computed in.
_WIDTHS = (32, 64)


def with_folding_casts(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an expression of the same value, without casts of integers that TVM may fail to fold.

    Casts of floating-point numbers to integers are left as they are, except to bool: outside of the range of the
    integers, C does not define them.
    """
    return tvm_ffi.structural_map(expr, (tirx.Cast, _folding))


def _folding(cast: tirx.Cast) -> tirx.PrimExpr:
    value = cast.value
    dtype, source = tvm_ffi.dtype(str(cast.ty.dtype)), tvm_ffi.dtype(str(value.ty.dtype))
    if str(dtype) == "bool":
        zero = tirx.const(0, str(source))
        if _is_integer(source):
            return tirx.NE(value, zero)
        # NaN is true, as C and NumPy have it; TVM compiles an inequality that is false of NaN.
        false, true = (tirx.const(number, "bool") for number in (0, 1))
        return cast if str(source) == "bool" else tirx.Select(tirx.EQ(value, zero), false, true)
    if not (_is_integer(dtype) and _is_integer(source)) or _holds(dtype, source):
        return cast
    if not _is_signed(dtype):
        return _to_unsigned(value, source, dtype.bits)
    # An axis is in the range of its dtype; analyses of what is tested need its plain form.
    return _to_signed(value, source, dtype.bits) if loads(value) else cast


def _is_signed(dtype) -> bool:
    return str(dtype).startswith("int")


def _is_integer(dtype) -> bool:
    return str(dtype).startswith(("int", "uint"))


def _holds(dtype, source) -> bool:
    """Tell whether a dtype of integers has all numbers of another."""
    if _is_signed(dtype) == _is_signed(source):
        return dtype.bits >= source.bits
    return _is_signed(dtype) and dtype.bits > source.bits


def _to_unsigned(value, source, bits: int) -> tirx.PrimExpr:
    if bits == 64:  # TVM does not fold a reinterpretation
        return tirx.reinterpret("uint64", _widened(value, source, bits))
    return tirx.Cast(f"uint{bits}", _remainder(value, source, bits))


def _to_signed(value, source, bits: int) -> tirx.PrimExpr:
    if bits == 64:
        return tirx.reinterpret("int64", value)
    rest = _remainder(value, source, bits)
    half, size = (tirx.const(2**power, str(rest.ty.dtype)) for power in (bits - 1, bits))
    return tirx.Cast(f"int{bits}", tirx.FloorMod(rest + half, size) - half)


def _remainder(value, source, bits: int) -> tirx.PrimExpr:
    """Return a value modulo ``2**bits``, in a signed dtype that holds twice that."""
    width = next(width for width in _WIDTHS if width > bits)
    if _is_signed(source):
        value = _widened(value, source, width)
        return tirx.FloorMod(value, tirx.const(2**bits, str(value.ty.dtype)))
    if source.bits > bits:
        value = tirx.FloorMod(value, tirx.const(2**bits, str(source)))
    return tirx.Cast(f"int{width}", value)


def _widened(value, source, bits: int) -> tirx.PrimExpr:
    return value if source.bits >= bits else tirx.Cast(f"int{bits}", value)
