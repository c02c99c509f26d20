"""Loop programs that count in 64 bits: an inverse of an index needs one dtype."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.ir import Range as Interval

from ..ir.compat import Analyzer
from ..ir.expressions import loads
from ..ir.int64 import int64_index, to_int64, with_int64_indices
from .program import Part, Program
from .statements import Bind, If, Loop, Statement, Store, dtype_of


def with_int64_loops(program: Program) -> Program:
    """Return a loop program with loops, bindings and indices of int64 instead of int32.

    Indices are simplified within the ranges of the loops.
    """
    parts = [
        Part(_statement(part.statement, {}, Analyzer()), part.source, part.name)
        for part in program.parts
    ]
    return Program(program.inputs, program.outputs, program.allocated, parts)


def _statement(statement: Statement, names: Mapping, known: Analyzer) -> Statement:
    """Return a wide statement; ``names`` has the wide variables of the loops and bindings around
    it."""
    return _statements((statement,), names, known)[0]


def _statements(statements: tuple, names: Mapping, known: Analyzer) -> tuple:
    names = dict(names)
    converted: list[Statement] = []

    def inner(body: tuple) -> tuple:
        return _statements(body, names, known)

    for statement in statements:
        if isinstance(statement, Store):
            indices = tuple(int64_index(index, names, known) for index in statement.indices)
            converted.append(
                Store(statement.buffer, indices, with_int64_indices(statement.value, names, known))
            )
        elif isinstance(statement, Bind):
            is_narrow = dtype_of(statement.var) == "int32"
            value = with_int64_indices(statement.value, names, known)
            if is_narrow:
                value = to_int64(statement.value, names, known)
                names[statement.var] = tirx.Var(statement.var.name, "int64")
            converted.append(Bind(names.get(statement.var, statement.var), value))
        elif isinstance(statement, If):
            condition = with_int64_indices(statement.condition, names, known)
            converted.append(
                If(condition, inner(statement.body), inner(statement.otherwise), statement.is_init)
            )
        else:
            start, extent = (
                int64_index(expr, names, known) for expr in (statement.start, statement.extent)
            )
            var = tirx.Var(statement.var.name, "int64")
            names[statement.var] = var
            if not loads(start) and not loads(extent):
                known.bind(var, Interval.from_min_extent(start, extent))
            converted.append(Loop(var, start, extent, inner(statement.body)))
    return tuple(converted)
