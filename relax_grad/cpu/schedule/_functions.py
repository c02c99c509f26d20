"""Functions of float32 as arithmetic, which LLVM vectorises; functions of the C library take
scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.ir import Call

from ...ir.compat import BufferLoad, structural_map, structural_walk
from ...ir.expressions import are_equal, loads
from ...ir.module import IF_THEN_ELSE
from ..kernel.language import functions
from ._fuse import weigh
from ._halves import bits_of_rounded, rounds
from ._identities import FUNCTIONS, arguments_of, name_of, with_functions

_FUNCTIONS: dict[str, Callable] = {
    **FUNCTIONS,
    "tirx.atanh": functions.atanh,
    "tirx.exp": functions.exp,
    "tirx.sigmoid": functions.sigmoid,
    "tirx.tanh": functions.tanh,
    "tirx.erf": functions.erf,
}

#: Functions with so many steps that TVM would take very long to compile them as one expression.
_LONG: dict[str, Callable] = {"tirx.log": functions.log, "tirx.pow": functions.power}

#: Powers that are products.
_PRODUCTS: dict[float, Callable] = {2.0: lambda x, _: x * x, 3.0: lambda x, _: x * x * x}


def as_arithmetic(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an expression with float32 functions and roundings to bfloat16 replaced by arithmetic;
    some are computed by statements before it.

    The argument of a function that contains another function is stored and read from memory. TVM
    inlines ``Let`` values; since each function uses its argument many times, compiling three nested
    functions would take half a minute. Statements cannot compute arguments that a condition guards,
    or that use variables bound within the expression. There, nested functions beyond the second,
    and the long ones, remain calls of the C library.
    """
    has_names, (_, _, conditions) = bool(_names_in(expr)), weigh(expr)
    safe = _unguarded(expr) if conditions else []

    def keep(value: tirx.PrimExpr) -> tirx.PrimExpr:
        load = kept(value)
        safe.append(load)
        return load

    def has_statements(arguments: Sequence) -> bool:
        return not has_names and not (
            conditions and any(_is_guarded(argument, safe) for argument in arguments)
        )

    def can_be(x: tirx.PrimExpr) -> bool:
        return has_statements([x]) or not any(map(is_arithmetic, calls_in(x)))

    def call(node: Call) -> tirx.PrimExpr:
        if _is_one_of(node, _LONG) and _is_small_power(node):
            return functions.expression(_PRODUCTS[node.args[1].value], node.args[0])
        arguments = arguments_of(node)
        if rounds(node):
            (argument,) = arguments
            if has_functions(argument) and has_statements(arguments):
                argument = keep(argument)
            return functions.expression(bits_of_rounded, argument)
        if _is_one_of(node, _LONG) and has_statements(arguments):
            return _LONG[node.op.name](*map(keep, arguments), keep)
        if not _is_one_of(node, _FUNCTIONS):
            return node
        if has_statements(arguments):
            arguments = [
                keep(argument) if has_functions(argument) else argument for argument in arguments
            ]
            if conditions:
                return _FUNCTIONS[name_of(node)](*map(keep, arguments), keep)
        elif any(_names_in(name.value) for argument in arguments for name in _names_in(argument)):
            return node
        return functions.expression(_FUNCTIONS[name_of(node)], *arguments)

    return structural_map(with_functions(expr, can_be), (Call, call))


def _is_guarded(expr: tirx.PrimExpr, safe: list) -> bool:
    """Tell whether an expression may be unsafe to compute where its condition does not hold.

    This is so if it reads memory (except by the loads in ``safe``), divides integers, or contains
    ``if_then_else``.
    """
    unsafe = []

    def visit(node: tirx.PrimExpr) -> None:
        if isinstance(node, BufferLoad):
            unsafe.append(not any(are_equal(node, load) for load in safe))
        elif isinstance(node, Call):
            unsafe.append(node.op.same_as(IF_THEN_ELSE))
        else:
            unsafe.append(not str(node.ty.dtype).startswith("float"))

    divisions = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
    structural_walk(expr, ((BufferLoad, Call, *divisions), visit))
    return any(unsafe)


def _unguarded(expr: tirx.PrimExpr) -> list:
    """Return the loads of an expression that are executed regardless of its conditions."""

    def without_branches(node: tirx.PrimExpr) -> tirx.PrimExpr:
        if isinstance(node, tirx.Select):
            zero = tirx.const(0, str(node.ty.dtype))
            return tirx.Select(node.condition, zero, zero)
        if node.op.same_as(IF_THEN_ELSE):
            zero = tirx.const(0, str(node.ty.dtype))
            return tirx.if_then_else(node.args[0], zero, zero)
        return node

    rest = structural_map(expr, ((tirx.Select, Call), without_branches), order="pre")
    return loads(rest)


def calls_in(expr: tirx.PrimExpr) -> list[Call]:
    """Return the calls in an expression."""
    calls: list[Call] = []
    structural_walk(expr, (Call, calls.append))
    return calls


def has_functions(value: tirx.PrimExpr) -> bool:
    """Tell whether an expression contains functions as arithmetic (``Let`` expressions)."""
    return bool(_names_in(value))


def _names_in(expr: tirx.PrimExpr) -> list[tirx.Let]:
    names: list[tirx.Let] = []
    structural_walk(expr, (tirx.Let, names.append))
    return names


def kept(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Emit a statement that stores a value, and return a load of it: TVM does not inline values
    through memory."""
    buffer = T.alloc_buffer([1], str(value.ty.dtype), layout=None)
    T.buffer_store(buffer, value, [0])
    return buffer[0]


def _is_small_power(call: Call) -> bool:
    exponent = call.args[-1]
    return (
        len(call.args) == 2 and isinstance(exponent, tirx.FloatImm) and exponent.value in _PRODUCTS
    )


def _is_one_of(call: Call, functions: dict) -> bool:
    return name_of(call) in functions and str(call.ty.dtype) == "float32"


def is_arithmetic(call: Call) -> bool:
    """Tell whether :func:`as_arithmetic` replaces a call."""
    return _is_one_of(call, {**_FUNCTIONS, **_LONG})
