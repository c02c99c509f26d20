"""Rewriting of indices and conditions that TVM's analyses handle incorrectly.

TVM 0.26 and 0.27 flatten buffers by ``iter_map_simplify``, which rewrites ``(47 - v) // 12`` to
``v // -12 + 3`` and ``(11 - v) % 12`` to ``-(v % -12)``: both have other values, and index out of
bounds. To bound the accessed region of a buffer, TVM solves conditions that are affine in
variables, and fails to negate unsigned variables.
"""

from __future__ import annotations

from tvm import tirx

from ...ir.compat import structural_map
from ._integers import COMPARISONS, folding_comparison

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod)


def as_analyzable(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return an equivalent function without the indices and conditions that the analyses handle
    incorrectly."""
    return structural_map(function, [(_DIVISIONS, _ascending), (COMPARISONS, folding_comparison)])


def _ascending(node: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an equivalent division or remainder of an ascending iterator.

    For a positive m and any integer e, ``e // m == -((m - 1 - e) // m)`` and
    ``e % m == m - 1 - (m - 1 - e) % m``.
    """
    if not _is_wrong(node):
        return node
    size = tirx.IntImm(str(node.ty.dtype), int(node.b))
    one = tirx.IntImm(size.ty.dtype, 1)
    reflected = type(node)(size - one - node.a, size)
    if isinstance(node, tirx.FloorDiv):
        return tirx.IntImm(size.ty.dtype, 0) - reflected
    return size - one - reflected


def _is_wrong(node: tirx.PrimExpr) -> bool:
    is_signed = str(node.ty.dtype) in ("int32", "int64")
    is_positive = isinstance(node.b, tirx.IntImm) and int(node.b) > 0
    return is_signed and is_positive and _direction(node.a) == -1


def _direction(expr: tirx.PrimExpr) -> int | None:
    """Return 1 if an expression only adds iterators, -1 if it only subtracts them, 0 for a number,
    else None.

    A quotient or a remainder of an iterator counts as an iterator.
    """
    if isinstance(expr, tirx.IntImm):
        return 0
    if isinstance(expr, (tirx.Add, tirx.Sub)):
        sign = 1 if isinstance(expr, tirx.Add) else -1
        a, b = _direction(expr.a), _direction(expr.b)
        if a is None or b is None or a == -sign * b != 0:
            return None
        return a or sign * b
    if isinstance(expr, tirx.Mul):
        for factor, other in ((expr.a, expr.b), (expr.b, expr.a)):
            if isinstance(factor, tirx.IntImm):
                direction = _direction(other)
                return None if direction is None else direction * (1 if int(factor) > 0 else -1)
    return 1
