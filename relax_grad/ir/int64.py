"""Integers of expressions of TIR in 64 bits.

Functions of TOPI count in 32 bits or in 64, and those with windows mix both. TVM's analyses do not
look through casts. Arithmetic of loop variables does not overflow, so the wider computation has the
same results. Arithmetic of data may overflow, and keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import tirx

from .compat import Analyzer, BufferLoad, loaded_buffer, structural_map
from .expressions import loads, substitute

_ARITHMETIC = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max),
    *(tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod),
)

_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def with_int64_indices(expr: tirx.PrimExpr, names: Mapping, known: Analyzer) -> tirx.PrimExpr:
    """Return an expression of the same dtype, with wide indices, comparisons and operands of casts.

    Parameters
    ----------
    expr : tirx.PrimExpr
        The expression.
    names : Mapping[tirx.Var, tirx.Var]
        The wide variables that replace variables.
    known : Analyzer
        Knows the ranges of the wide variables, within which indices are simplified.
    """

    def load(node: tirx.BufferLoad) -> tirx.PrimExpr:
        indices = [int64_index(index, names, known) for index in node.indices]
        return tirx.BufferLoad(loaded_buffer(node), indices)

    def compare(node: tirx.PrimExpr) -> tirx.PrimExpr:
        if str(node.a.ty.dtype) != "int32" or loads(node):
            return node
        return type(node)(to_int64(node.a, names, known), to_int64(node.b, names, known))

    def widen(node: tirx.Cast) -> tirx.PrimExpr:
        if str(node.value.ty.dtype) != "int32" or str(node.ty.dtype) != "int64":
            return node
        return to_int64(node.value, names, known)

    rules = [(BufferLoad, load), (_COMPARISONS, compare), (tirx.Cast, widen)]
    return substitute(structural_map(expr, rules, order="post"), names)


def int64_index(expr: tirx.PrimExpr, names: Mapping, known: Analyzer) -> tirx.PrimExpr:
    """Return an index in 64 bits, simplified if it does not depend on data."""
    index = to_int64(expr, names, known)
    if loads(index):
        return index
    try:
        return known.simplify(index)
    except (tvm.error.InternalError, TypeError, ValueError):
        return index


def to_int64(expr: tirx.PrimExpr, names: Mapping, known: Analyzer) -> tirx.PrimExpr:
    """Return an integer expression in 64 bits."""
    if str(expr.ty.dtype) != "int32":
        expr = with_int64_indices(expr, names, known)
        return expr if str(expr.ty.dtype) == "int64" else tirx.Cast("int64", expr)
    if isinstance(expr, tirx.Var) and expr in names:
        return names[expr]
    if isinstance(expr, _ARITHMETIC) and not loads(expr):
        return type(expr)(to_int64(expr.a, names, known), to_int64(expr.b, names, known))
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm("int64", int(expr))
    return tirx.Cast("int64", with_int64_indices(expr, names, known))
