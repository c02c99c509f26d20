"""Divisions of integers by numbers of tensors: an error instead of a signal that ends the process.

x86 raises SIGFPE for a division by 0, and for the quotient of the least integer and -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from .compat import BufferLoad, StringImm, loaded_buffer, structural_map, structural_walk
from .expressions import loads, substitute, variables
from .module import is_buffer

_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)

_ARITHMETIC = (*_DIVISIONS, tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max)

_REMAINDERS = (tirx.Mod, tirx.FloorMod)


def with_checked_divisions(function: tirx.PrimFunc, name: str) -> tirx.PrimFunc:
    """Return a function that raises an error for a division of integers by 0.

    Only divisors from tensors and from numbers that the function takes are checked. A division in a
    branch that is not taken raises no error. The quotient of the least integer and -1 is the least
    integer, and its remainder is 0, as in NumPy.

    Parameters
    ----------
    function : tirx.PrimFunc
        The function; the same one is returned if it has no such division.
    name : str
        Its name, for the error.
    """
    data = _data(function)
    if not _has_checked(function, data):
        return function
    rules = [
        ((tirx.BufferStore, tirx.IfThenElse, tirx.For), partial(_checked, name, data)),
        (tirx.SeqStmt, partial(_checked_sequence, name, data)),
    ]
    body = structural_map(function.body, rules, order="post")
    body = structural_map(
        body,
        (_DIVISIONS, lambda node: _safe(node) if _needs_check(node, data) else node),
        order="post",
    )
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs, function.span)


def has_checked_divisions(function: tirx.PrimFunc) -> bool:
    """Tell whether a function divides integers by divisors that need a check."""
    return _has_checked(function, _data(function))


def _data(function: tirx.PrimFunc) -> set[tirx.Var]:
    """Return the variables of a function that hold numbers of tensors, or are arguments."""
    data = {param for param in function.params if not is_buffer(param)}
    binds: list[tirx.Stmt] = []
    structural_walk(function.body, ((tirx.Bind, tirx.Let), binds.append), order="pre")
    for bind in binds:
        if loads(bind.value) or variables(bind.value) & data:
            data.add(bind.var)
    return data


def _has_checked(function: tirx.PrimFunc, data: set[tirx.Var]) -> bool:
    found: list[tirx.PrimExpr] = []
    structural_walk(function.body, (_DIVISIONS, found.append))
    return any(_needs_check(node, data) for node in found)


def _needs_check(node: tirx.PrimExpr, data: set[tirx.Var]) -> bool:
    dtype = str(node.ty.dtype)
    if not dtype.startswith(("int", "uint")) or isinstance(node.b, tirx.IntImm):
        return False
    return bool(loads(node.b)) or bool(variables(node.b) & data)


def _checked(name: str, data: set[tirx.Var], stmt: tirx.Stmt) -> tirx.Stmt:
    """Return a statement after the checks of its expressions."""
    if isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.VECTORIZED and _asserts(stmt.body):
        stmt = tirx.For(
            stmt.loop_var,
            stmt.min,
            stmt.extent,
            tirx.ForKind.SERIAL,
            stmt.body,
            annotations=stmt.annotations,
        )
    checks = _checks(name, data, stmt)
    return tirx.SeqStmt([*checks, stmt]) if checks else stmt


def _checked_sequence(name: str, data: set[tirx.Var], stmt: tirx.SeqStmt) -> tirx.Stmt:
    """Return a sequence with checks before its bindings, whose scope it is."""
    statements: list[tirx.Stmt] = []
    for part in stmt.seq:
        if isinstance(part, (tirx.Bind, tirx.Evaluate)):
            statements += _checks(name, data, part)
        statements += part.seq if isinstance(part, tirx.SeqStmt) else [part]
    return tirx.SeqStmt(statements) if len(statements) > len(stmt.seq) else stmt


def _checks(name: str, data: set[tirx.Var], stmt: tirx.Stmt) -> list[tirx.Stmt]:
    if isinstance(stmt, tirx.BufferStore):
        expressions = [*stmt.indices, stmt.value]
    elif isinstance(stmt, tirx.IfThenElse):
        expressions = [stmt.condition]
    elif isinstance(stmt, tirx.For):
        expressions = [stmt.min, stmt.extent]
    else:
        expressions = [stmt.value]
    message = f"{name}: an integer is divided by 0; pass divisors other than 0"
    checks: list[tirx.Stmt] = []
    for expr in expressions:
        for divisor, guards in _divisors(_without_lets(expr), data, ()):
            for lane in _lanes(divisor):
                is_valid = lane != tirx.IntImm(str(lane.ty.dtype), 0)
                check = tirx.AssertStmt(is_valid, StringImm("ValueError"), [StringImm(message)])
                for guard in reversed(guards):
                    check = tirx.IfThenElse(guard, check, None)
                checks.append(check)
    return checks


def _divisors(expr: tirx.PrimExpr, data: set[tirx.Var], guards: tuple) -> Iterator[tuple]:
    """Yield each divisor to check with the conditions under which it divides, inner ones first."""
    if isinstance(expr, tirx.Select):
        condition, branches = expr.condition, (expr.true_value, expr.false_value)
    elif isinstance(expr, Call) and getattr(expr.op, "name", "").endswith(".if_then_else"):
        condition, branches = expr.args[0], tuple(expr.args[1:])
    else:
        for child in _children(expr):
            yield from _divisors(child, data, guards)
        if isinstance(expr, _DIVISIONS) and _needs_check(expr, data):
            yield expr.b, guards
        return
    yield from _divisors(condition, data, guards)
    if "x" in str(condition.ty.dtype):  # lanes differ: the divisors of both branches are checked
        conditions: tuple = ((), ())
    else:
        conditions = (condition,), (tirx.Not(condition),)
    for branch, more in zip(branches, conditions, strict=True):
        yield from _divisors(branch, data, (*guards, *more))


def _children(expr: tirx.PrimExpr) -> list:
    if isinstance(expr, Call):
        return [argument for argument in expr.args if isinstance(argument, tirx.Expr)]
    names = ("a", "b", "value", "base", "stride")
    children = [getattr(expr, name, None) for name in names]
    children += list(getattr(expr, "indices", ()))
    return [child for child in children if isinstance(child, tirx.Expr)]


def _lanes(expr: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    """Return the scalar expressions of the lanes of an expression."""
    count = tvm_ffi.dtype(str(expr.ty.dtype)).lanes
    if count == 1:
        return [expr]

    return [_lane(expr, k) for k in range(count)]


def _lane(expr: tirx.PrimExpr, k: int) -> tirx.PrimExpr:
    if tvm_ffi.dtype(str(expr.ty.dtype)).lanes == 1:
        return expr
    if isinstance(expr, tirx.Ramp):
        return expr.base + expr.stride * tirx.IntImm(str(expr.base.ty.dtype), k)
    if isinstance(expr, tirx.Broadcast):
        return expr.value
    if isinstance(expr, BufferLoad):
        indices = [*expr.indices]
        return tirx.BufferLoad(loaded_buffer(expr), [*indices[:-1], _lane(indices[-1], k)])
    if isinstance(expr, tirx.Cast):
        return tirx.Cast(str(expr.ty.dtype).partition("x")[0], _lane(expr.value, k))
    if isinstance(expr, _ARITHMETIC):
        return type(expr)(_lane(expr.a, k), _lane(expr.b, k))
    raise ValueError(f"a vector of divisors has an unknown form: {expr}")


def _safe(node: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return a division that no divisor traps: by 0, which the checks refuse, it is one by 1."""
    a, b = node.a, node.b
    one, zero = tirx.const(1, str(b.ty.dtype)), tirx.const(0, str(b.ty.dtype))
    if str(b.ty.dtype).startswith("uint"):
        return type(node)(a, tirx.Select(b == zero, one, b))
    # By -1: the remainder is 0, and the quotient the negative number, modulo a power of two.
    divided = type(node)(a, tirx.Select(tirx.Or(b == zero, b == -one), one, b))
    if isinstance(node, _REMAINDERS):
        return divided
    bits = f"u{a.ty.dtype}"
    # TVM takes 0 - a of unsigned numbers for 0, as a is not negative.
    complement = tirx.bitwise_not(tirx.reinterpret(bits, a)) + tirx.const(1, bits)
    negative = tirx.reinterpret(str(a.ty.dtype), complement)
    return tirx.Select(b == -one, negative, divided)


def _asserts(stmt: tirx.Stmt) -> bool:
    found: list[tirx.Stmt] = []
    structural_walk(stmt, (tirx.AssertStmt, found.append))
    return bool(found)


def _without_lets(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    def inlined(let: tirx.Let) -> tirx.PrimExpr:
        return substitute(let.body, {let.var: let.value})

    return structural_map(expr, (tirx.Let, inlined), order="post")
