"""Floating-point operations that TVM's simplifier leaves as they are.

It takes floating-point numbers for real ones: ``x == x`` becomes true, ``not x < y`` becomes
``y <= x``, ``x < y or x >= y`` becomes true, ``(x + c) - c`` becomes ``x``, and ``0 * x`` becomes
0. NaN, infinities and rounding have other results.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Call, Op

from .compat import structural_map, structural_walk
from .module import IS_KERNEL, with_body, with_changed_functions

#: A reinterpretation of a value in its own dtype, which the simplifier keeps, and which is no
#: instruction.
_SAME = Op.get("tirx.reinterpret")

_FLOATS = ("float32", "float64")

_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def with_guarded_floats(node: tirx.Stmt | tirx.PrimExpr) -> tirx.Stmt | tirx.PrimExpr:
    """Return an expression or a statement in which an operand of each operation that the simplifier
    would change is a reinterpretation of itself."""
    rules = [
        (tirx.Sub, _difference),
        ((tirx.EQ, tirx.NE), _equality),
        (tirx.Not, _negation),
        ((tirx.And, tirx.Or), _connection),
        ((tirx.Mul, tirx.Div), _with_zero),
        (tirx.IfThenElse, _branches),
        (tirx.Bind, _variable),
    ]
    return structural_map(node, rules, order="post")


def guarded(expr: tirx.PrimExpr) -> Call:
    """Return a reinterpretation of a value in its own dtype."""
    if isinstance(expr, Call) and expr.op.same_as(_SAME):
        return expr
    return tirx.call_intrin(str(expr.ty.dtype), _SAME, expr)


def without_guards(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an expression without the reinterpretations of :func:`with_guarded_floats`."""
    return structural_map(expr, (Call, _unguarded), order="post")


def guard_floats(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose tensor functions, without the kernels, have guarded floating-point
    operations."""
    return with_changed_functions(
        mod,
        tirx.PrimFunc,
        lambda function: (
            function if function.attrs.get(IS_KERNEL, False) else with_guards(function)
        ),
    )


def with_guards(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function with guarded floating-point operations."""
    return with_body(function, with_guarded_floats(function.body))


def _is_float(expr: tirx.PrimExpr) -> bool:
    return str(expr.ty.dtype).partition("x")[0] in _FLOATS


def _unguarded(call: Call) -> tirx.PrimExpr:
    if call.op.same_as(_SAME) and str(call.args[0].ty.dtype) == str(call.ty.dtype):
        return call.args[0]
    return call


def _difference(node: tirx.Sub) -> tirx.Sub:
    return tirx.Sub(node.a, guarded(node.b)) if _is_float(node) else node


def _equality(node: tirx.EQ | tirx.NE) -> tirx.PrimExpr:
    is_same = type(node.a) is type(node.b) and _is_float(node.a)
    return type(node)(node.a, guarded(node.b)) if is_same else node


def _negation(node: tirx.Not) -> tirx.Not:
    is_plain = isinstance(node.a, (tirx.EQ, tirx.NE)) or not _compares_floats(node.a)
    return node if is_plain else tirx.Not(guarded(node.a))


def _connection(node: tirx.And | tirx.Or) -> tirx.PrimExpr:
    parts = node.a, node.b
    if not any(map(_compares_floats, parts)):
        return node
    return type(node)(*(guarded(part) if _compares_floats(part) else part for part in parts))


def _compares_floats(expr: tirx.PrimExpr) -> bool:
    if isinstance(expr, (tirx.And, tirx.Or)):
        return any(isinstance(part, Call) for part in (expr.a, expr.b))
    return isinstance(expr, _COMPARISONS) and _is_float(expr.a)


def _with_zero(node: tirx.Mul | tirx.Div) -> tirx.PrimExpr:
    if not _is_float(node):
        return node
    a, b = node.a, node.b
    if _is_zero(a):
        return type(node)(guarded(a), b)
    return tirx.Mul(a, guarded(b)) if isinstance(node, tirx.Mul) and _is_zero(b) else node


def _is_zero(expr: tirx.PrimExpr) -> bool:
    expr = expr.value if isinstance(expr, tirx.Broadcast) else expr
    return isinstance(expr, tirx.FloatImm) and not expr.value


def _variable(node: tirx.Bind) -> tirx.Bind:
    """The simplifier fails on the range of a product or a quotient of a selection."""
    if not _is_float(node.value):
        return node
    found: list[object] = []
    structural_walk(node.value, (tirx.Select, found.append))
    return tirx.Bind(node.var, guarded(node.value)) if found else node


def _branches(node: tirx.IfThenElse) -> tirx.IfThenElse:
    """The simplifier takes the condition to be true in one branch and its reverse in the other."""
    if not _compares_floats(node.condition):
        return node
    return tirx.IfThenElse(guarded(node.condition), node.then_case, node.else_case, node.span)
