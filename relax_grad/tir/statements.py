"""Statements of loop programs, and expressions of TIR within them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op

from ..ir.compat import loaded_buffer
from ..ir.expressions import loads, substitute
from ..ir.module import is_buffer


@dataclass(frozen=True)
class Bind:
    """A variable and its value, which the following statements of the list may use."""

    var: tirx.Var
    value: tirx.PrimExpr


@dataclass(frozen=True)
class Store:
    """``buffer[indices] = value``."""

    buffer: tirx.Var
    indices: tuple[tirx.PrimExpr, ...]
    value: tirx.PrimExpr


@dataclass(frozen=True)
class If:
    """A conditional.

    Attributes
    ----------
    condition : tirx.PrimExpr
        The condition.
    body, otherwise : tuple[Statement, ...]
        The statements of both branches.
    is_init : bool
        Whether it initialises a reduction: the condition holds in the first iteration of some loops
        only.
    """

    condition: tirx.PrimExpr
    body: tuple
    otherwise: tuple = ()
    is_init: bool = False


@dataclass(frozen=True)
class Loop:
    """A serial loop over ``range(start, start + extent)``."""

    var: tirx.Var
    start: tirx.PrimExpr
    extent: tirx.PrimExpr
    body: tuple


Statement = Bind | Store | If | Loop

_ORDERED = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def walk(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Yield each statement, and those within it."""
    for statement in statements:
        yield statement
        if isinstance(statement, (Loop, If)):
            yield from walk(statement.body)
        if isinstance(statement, If):
            yield from walk(statement.otherwise)


def stores(statements: Iterable[Statement]) -> list[Store]:
    """Return the stores within statements."""
    return [statement for statement in walk(statements) if isinstance(statement, Store)]


def expressions(statement: Statement) -> Iterator[tirx.PrimExpr]:
    """Yield the expressions of a statement, without the expressions of the statements within it."""
    if isinstance(statement, Store):
        yield from (*statement.indices, statement.value)
    elif isinstance(statement, Bind):
        yield statement.value
    elif isinstance(statement, If):
        yield statement.condition
    else:
        yield from (statement.start, statement.extent)


def reads(statements: Iterable[Statement]) -> set[tirx.Var]:
    """Return the buffers that statements read."""
    return {
        loaded_buffer(load)
        for statement in walk(statements)
        for expr in expressions(statement)
        for load in loads(expr)
    }


def mapped(statement: Statement, change: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> Statement:
    """Return a statement with a function applied to all expressions."""
    if isinstance(statement, Store):
        indices = tuple(map(change, statement.indices))
        return Store(statement.buffer, indices, change(statement.value))
    if isinstance(statement, Bind):
        return Bind(statement.var, change(statement.value))
    body = tuple(mapped(inner, change) for inner in statement.body)
    if isinstance(statement, If):
        otherwise = tuple(mapped(inner, change) for inner in statement.otherwise)
        return replace(
            statement, condition=change(statement.condition), body=body, otherwise=otherwise
        )
    return Loop(statement.var, change(statement.start), change(statement.extent), body)


def backwards(loop: Loop) -> Loop:
    """Return a loop that runs from the last iteration to the first."""
    var = tirx.Var(f"{loop.var.name}_back", loop.var.ty.dtype)
    dtype = str(var.ty.dtype)
    one = tirx.IntImm(dtype, 1)
    value = cast(loop.start, dtype) + (cast(loop.extent, dtype) - one - var)
    body = [mapped(inner, lambda e: substitute(e, {loop.var: value})) for inner in loop.body]
    return Loop(var, tirx.IntImm(dtype, 0), loop.extent, tuple(body))


# Expressions


def is_number(expr: tirx.PrimExpr, number: int) -> bool:
    """Tell whether an expression is an integer constant with this value."""
    return isinstance(expr, tirx.IntImm) and int(expr) == number


def is_true(expr: tirx.PrimExpr) -> bool:
    """Tell whether a condition is the constant True."""
    return isinstance(expr, tirx.IntImm) and bool(int(expr))


def dtype_of(expr: tirx.PrimExpr) -> str:
    """Return the dtype of an expression or a buffer."""
    return str(expr.dtype) if is_buffer_var(expr) else str(expr.ty.dtype)


def is_buffer_var(expr: object) -> bool:
    """Tell whether an expression is a buffer."""
    return isinstance(expr, tirx.Var) and is_buffer(expr)


def is_float(dtype: str) -> bool:
    """Tell whether a dtype is one of floating-point numbers that have gradients."""
    return dtype.startswith(("float", "bfloat")) and not dtype.startswith("float8")


def op_name(call: Call) -> str:
    """Return the name of the function that an expression calls, without its namespace."""
    return call.op.name.rpartition(".")[2] if isinstance(call.op, Op) else str(call.op)


def conjunction(conditions: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
    """Return the conjunction of conditions without loads."""
    return reduce(tirx.And, conditions)


def has_gradient(param: tirx.Var) -> bool:
    """Tell whether a parameter is a buffer of floating-point numbers."""
    return is_buffer(param) and is_float(dtype_of(param))


def negated(condition: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the negation of a condition.

    TVM takes ``not a < b`` for ``b <= a``, which differs for NaN. It leaves a selection alone.
    """
    compared: list[tirx.PrimExpr] = []
    tvm_ffi.structural_walk(condition, (_ORDERED, compared.append))
    if not any(is_float(dtype_of(node.a)) for node in compared):
        return tirx.Not(condition)
    return tirx.Select(condition, tirx.const(False, "bool"), tirx.const(True, "bool"))


def guarded(guards: Sequence[tirx.PrimExpr], statement: Statement) -> Statement:
    """Return a statement under conditions, each of which may be evaluated only if those before it
    hold."""
    for guard in reversed(guards):
        statement = If(guard, (statement,))
    return statement


def bounds_of_data(buffer: tirx.Var, indices: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
    """Return the conditions under which indices that depend on data are in bounds."""
    bounds = []
    for index, extent in zip(indices, buffer.shape, strict=True):
        if loads(index):
            dtype = dtype_of(index)
            bounds.append(tirx.And(index >= tirx.IntImm(dtype, 0), index < cast(extent, dtype)))
    return bounds


def cast(expr: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """Return an expression in a dtype."""
    if dtype_of(expr) == dtype:
        return expr
    return tirx.IntImm(dtype, int(expr)) if is_integer(expr, dtype) else tirx.Cast(dtype, expr)


def is_integer(expr: tirx.PrimExpr, dtype: str) -> bool:
    """Tell whether an expression is an integer constant, and a dtype one of integers."""
    return isinstance(expr, tirx.IntImm) and dtype.startswith("int")


def new_buffer(shape: Sequence, dtype: str, name: str) -> tirx.Var:
    """Return a new buffer in row-major order."""
    return tirx.decl_buffer(list(shape), dtype, name, layout=None)
