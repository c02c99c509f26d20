"""Integer operations in forms that TVM folds like C: modulo a power of two.

TVM raises an error if it folds the cast of a constant that the target dtype cannot represent, such
as -3 to uint8 or 300 to int8, and if it finds a negative difference of unsigned numbers, for
example when it subtracts the operands of a comparison. Fusion creates such operations: the constant
that one nest stores is inlined into the expression of another.
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import Op

from ...ir.compat import structural_map
from ...ir.expressions import loads

#: The signed dtypes that remainders are computed in.
_WIDTHS = (32, 64)

#: The operator that reinterprets the bits of a number as another dtype.
REINTERPRET = Op.get("tirx.reinterpret")

_EQUALITIES = (tirx.EQ, tirx.NE)

#: Comparisons of two operands.
COMPARISONS = (*_EQUALITIES, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def with_folding_integers(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an equivalent expression without integer operations that TVM may fail to fold.

    Casts of floating-point numbers to integers are unchanged, except to bool: C does not define
    them outside the range of the integers.
    """
    rules = [
        (tirx.Cast, _folding),
        (COMPARISONS, folding_comparison),
        ((tirx.Sub, tirx.Min, tirx.Max), _folding_operation),
    ]
    return structural_map(expr, rules)


def folding_comparison(node: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a comparison of unsigned numbers as one of signed numbers."""
    if not _is_unsigned(node.a.ty.dtype):
        return node
    if tvm_ffi.dtype(str(node.a.ty.dtype)).bits < 64:
        return type(node)(*_wide(node))
    operands = [_reinterpreted("int64", operand) for operand in (node.a, node.b)]
    if not isinstance(node, _EQUALITIES):
        # Unsigned numbers are ordered like signed numbers with the sign bit flipped.
        operands = [operand ^ tirx.const(-(2**63), "int64") for operand in operands]
    return type(node)(*operands)


def _folding_operation(node: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a difference, minimum or maximum of unsigned numbers as one of signed numbers."""
    if not _is_unsigned(node.ty.dtype):
        return node
    dtype = tvm_ffi.dtype(str(node.ty.dtype))
    if dtype.bits < 64:
        result = type(node)(*_wide(node))
        if not isinstance(node, tirx.Sub):
            return tirx.Cast(str(dtype), result)
        return _to_unsigned(result, tvm_ffi.dtype(str(result.ty.dtype)), dtype.bits)
    if not isinstance(node, tirx.Sub):  # no signed dtype holds the operands
        return node
    a, b = (_reinterpreted("int64", operand) for operand in (node.a, node.b))
    return _reinterpreted("uint64", a - b)


def _wide(node: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    """Return two unsigned operands in a signed dtype that holds them."""
    dtype = f"int{_width(tvm_ffi.dtype(str(node.a.ty.dtype)).bits)}"
    return [tirx.Cast(dtype, operand) for operand in (node.a, node.b)]


def _width(bits: int) -> int:
    return next(width for width in _WIDTHS if width > bits)


def _reinterpreted(dtype: str, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the integer of a dtype with the same bits.

    0 is treated separately, because the code generator compiles its reinterpretation to a null
    pointer.
    """
    if isinstance(value, tirx.Select) and getattr(value.false_value, "op", None) == REINTERPRET:
        (before,) = value.false_value.args
        if str(before.ty.dtype) == dtype:
            return before
    zero = tirx.const(0, str(value.ty.dtype))
    return tirx.Select(tirx.EQ(value, zero), tirx.const(0, dtype), tirx.reinterpret(dtype, value))


def _folding(cast: tirx.Cast) -> tirx.PrimExpr:
    value = cast.value
    dtype, source = tvm_ffi.dtype(str(cast.ty.dtype)), tvm_ffi.dtype(str(value.ty.dtype))
    if str(dtype) == "bool":
        zero = tirx.const(0, str(source))
        if _is_integer(source):
            return tirx.NE(value, zero)
        # NaN is true, as in C and NumPy; TVM compiles NE to a comparison that is false for NaN.
        false, true = (tirx.const(number, "bool") for number in (0, 1))
        return cast if str(source) == "bool" else tirx.Select(tirx.EQ(value, zero), false, true)
    if not (_is_integer(dtype) and _is_integer(source)) or _holds(dtype, source):
        return cast
    if not _is_signed(dtype):
        return _to_unsigned(value, source, dtype.bits)
    # Axes do not exceed the range of their dtype; without loads, the plain cast is kept for the
    # analyses of conditions.
    return _to_signed(value, source, dtype.bits) if loads(value) else cast


def _is_signed(dtype: tvm_ffi.dtype) -> bool:
    return str(dtype).startswith("int")


def _is_unsigned(dtype: tvm_ffi.dtype) -> bool:
    return str(dtype).startswith("uint")


def _is_integer(dtype: tvm_ffi.dtype) -> bool:
    return _is_signed(dtype) or _is_unsigned(dtype)


def _holds(dtype: tvm_ffi.dtype, source: tvm_ffi.dtype) -> bool:
    """Tell whether an integer dtype can represent all numbers of another."""
    if _is_signed(dtype) == _is_signed(source):
        return dtype.bits >= source.bits
    return _is_signed(dtype) and dtype.bits > source.bits


def _to_unsigned(value: tirx.PrimExpr, source: tvm_ffi.dtype, bits: int) -> tirx.PrimExpr:
    if bits == 64:
        return _reinterpreted("uint64", _widened(value, source, bits))
    return tirx.Cast(f"uint{bits}", _remainder(value, source, bits))


def _to_signed(value: tirx.PrimExpr, source: tvm_ffi.dtype, bits: int) -> tirx.PrimExpr:
    if bits == 64:
        return _reinterpreted("int64", value)
    rest = _remainder(value, source, bits)
    half, size = (tirx.const(2**power, str(rest.ty.dtype)) for power in (bits - 1, bits))
    return tirx.Cast(f"int{bits}", tirx.FloorMod(rest + half, size) - half)


def _remainder(value: tirx.PrimExpr, source: tvm_ffi.dtype, bits: int) -> tirx.PrimExpr:
    """Return a value modulo ``2**bits``, in a signed dtype of more than ``bits`` bits."""
    width = _width(bits)
    if _is_signed(source):
        value = _widened(value, source, width)
        return tirx.FloorMod(value, tirx.const(2**bits, str(value.ty.dtype)))
    if source.bits > bits:
        value = tirx.FloorMod(value, tirx.const(2**bits, str(source)))
    return tirx.Cast(f"int{width}", value)


def _widened(value: tirx.PrimExpr, source: tvm_ffi.dtype, bits: int) -> tirx.PrimExpr:
    return value if source.bits >= bits else tirx.Cast(f"int{bits}", value)
