"""Loop programs that count in 64 bits: an inverse of an index needs one dtype."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.ir import Range as Interval

from ..ir.compat import Analyzer
from ..ir.expressions import loads
from ..ir.int64 import int64_index, to_int64, with_int64_indices
from .program import Bind, If, Loop, Part, Program, Statement, Store, dtype_of


def with_int64_loops(program: Program) -> Program:
    """Return a loop program with loops, bindings and indices of int64 in the place of int32.

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
    names, found = dict(names), []

    def inner(body: tuple) -> tuple:
        return _statements(body, names, known)

    for each in statements:
        if isinstance(each, Store):
            indices = tuple(int64_index(index, names, known) for index in each.indices)
            found.append(Store(each.buffer, indices, with_int64_indices(each.value, names, known)))
        elif isinstance(each, Bind):
            is_narrow = dtype_of(each.var) == "int32"
            value = with_int64_indices(each.value, names, known)
            if is_narrow:
                value = to_int64(each.value, names, known)
                names[each.var] = tirx.Var(each.var.name, "int64")
            found.append(Bind(names.get(each.var, each.var), value))
        elif isinstance(each, If):
            condition = with_int64_indices(each.condition, names, known)
            found.append(If(condition, inner(each.body), inner(each.otherwise), each.is_init))
        else:
            start, extent = (int64_index(expr, names, known) for expr in (each.start, each.extent))
            var = tirx.Var(each.var.name, "int64")
            names[each.var] = var
            if not loads(start) and not loads(extent):
                known.bind(var, Interval.from_min_extent(start, extent))
            found.append(Loop(var, start, extent, inner(each.body)))
    return tuple(found)
