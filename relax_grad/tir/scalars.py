"""Numbers that go through memory, as variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from tvm import tirx

from ..ir.compat import BufferLoad, loaded_buffer, structural_map
from ..ir.expressions import loads
from .statements import (
    Bind,
    If,
    Loop,
    Statement,
    Store,
    dtype_of,
    expressions,
    is_float,
    is_number,
    mapped,
)


def with_bindings(
    statements: Sequence[Statement], allocated: Collection[tirx.Var]
) -> tuple[tuple[Statement, ...], set[tirx.Var]]:
    """Return statements that bind variables instead of stores to buffers of one number, and these
    buffers.

    The cotangent of a variable is an expression; a buffer has a buffer for it.

    Parameters
    ----------
    statements : Sequence[Statement]
        The statements.
    allocated : Collection[tirx.Var]
        The buffers that only these statements use. A buffer becomes a variable if there is one
        store to it, before all loads.
    """
    numbers = {buffer for buffer in allocated if _holds_a_number(buffer)}
    if not numbers:
        return tuple(statements), numbers
    stored: set[tirx.Var] = set()
    numbers -= _others(statements, numbers, frozenset(), stored)
    names = {buffer: tirx.Var(buffer.name, dtype_of(buffer)) for buffer in numbers & stored}
    return _bound(statements, names), set(names)


def _holds_a_number(buffer: tirx.Var) -> bool:
    return is_float(dtype_of(buffer)) and all(is_number(extent, 1) for extent in buffer.shape)


def _others(
    statements: Sequence[Statement],
    numbers: Collection[tirx.Var],
    known: frozenset[tirx.Var],
    stored: set[tirx.Var],
) -> set[tirx.Var]:
    """Return the buffers that are stored twice, or loaded where no store is known to be done."""
    others: set[tirx.Var] = set()
    for statement in statements:
        read = {loaded_buffer(load) for expr in expressions(statement) for load in loads(expr)}
        others |= {buffer for buffer in read if buffer in numbers and buffer not in known}
        if isinstance(statement, Store) and statement.buffer in numbers:
            if statement.buffer in stored:
                others.add(statement.buffer)
            stored.add(statement.buffer)
            known |= {statement.buffer}
        elif isinstance(statement, (If, Loop)):
            others |= _others(statement.body, numbers, known, stored)
            if isinstance(statement, If):
                others |= _others(statement.otherwise, numbers, known, stored)
    return others


def _bound(statements: Sequence[Statement], names: dict[tirx.Var, tirx.Var]) -> tuple:
    rename = partial(_renamed, names=names)
    made: list[Statement] = []
    for statement in statements:
        if isinstance(statement, Store) and statement.buffer in names:
            made.append(Bind(names[statement.buffer], rename(statement.value)))
        elif isinstance(statement, If):
            body, otherwise = _bound(statement.body, names), _bound(statement.otherwise, names)
            made.append(If(rename(statement.condition), body, otherwise, statement.is_init))
        elif isinstance(statement, Loop):
            start, extent = rename(statement.start), rename(statement.extent)
            made.append(Loop(statement.var, start, extent, _bound(statement.body, names)))
        else:
            made.append(mapped(statement, rename))
    return tuple(made)


def _renamed(expr: tirx.PrimExpr, names: dict[tirx.Var, tirx.Var]) -> tirx.PrimExpr:
    def loaded(load: BufferLoad) -> tirx.PrimExpr:
        return names.get(loaded_buffer(load), load)

    return structural_map(expr, (BufferLoad, loaded), order="post")
