"""Statements of tensor functions: blocks with their loops, and the function around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Range as Interval

from ..ir.compat import (
    Analyzer,
    BufferLoad,
    SBlock,
    SBlockRealize,
    detect_linear_equation,
    loaded_buffer,
)
from ..ir.expressions import loads, substitute, variables
from ..ir.loops import with_canonical_loops
from ..ir.shared_values import with_shared_values
from .access import Range, determines
from .flat import same
from .statements import (
    Bind,
    If,
    Loop,
    Statement,
    Store,
    cast,
    dtype_of,
    expressions,
    is_buffer_var,
    is_number,
    mapped,
    reads,
    stores,
    walk,
)

SPATIAL, REDUCED = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def block(
    name: str,
    axes: Sequence[tuple[Range, int]],
    body: tirx.Stmt,
    init: tirx.Stmt | None = None,
) -> tirx.Stmt:
    """Return a block within a loop for each axis.

    Parameters
    ----------
    name : str
        The name of the block.
    axes : Sequence[tuple[Range, int]]
        The ranges of the axes, in the order of the loops, and their types.
    body : tirx.Stmt
        The body.
    init : tirx.Stmt, optional
        The initialisation of a reduction.
    """
    iters, values, loops = [], [], []
    for axis, kind in axes:
        dtype = str(axis.var.ty.dtype)
        start, extent = (cast(expr, dtype) for expr in (axis.start, axis.extent))
        iters.append(tirx.IterVar(Interval.from_min_extent(start, extent), axis.var, kind))
        loop = tirx.Var(f"{axis.var.name}_loop", dtype)
        is_first = isinstance(start, tirx.IntImm) and int(start) == 0
        values.append(loop if is_first else loop + start)
        loops.append((loop, extent))
    made = SBlock(iters, [], [], name, body, init)
    buffers = {var: var for var in variables(made) if is_buffer_var(var)}
    inputs, writes, opaque = s_tir.analysis.get_sblock_access_region(made, buffers)
    made = SBlock(iters, [*inputs, *opaque], list(writes), name, body, init)
    stmt = SBlockRealize(values, tirx.const(True, "bool"), made)
    for loop, extent in reversed(loops):
        zero = tirx.IntImm(str(loop.ty.dtype), 0)
        stmt = tirx.For(loop, zero, extent, tirx.ForKind.SERIAL, stmt)
    return stmt


def sequence(statements: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Return statements as one."""
    if not statements:
        return tirx.Evaluate(tirx.IntImm("int32", 0))
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def lowered(statements: Sequence[Statement]) -> tirx.Stmt:
    """Return the statements of a loop program, with new variables for loops and bindings."""
    return sequence(_lowered(statements, {}))


def _lowered(statements: Sequence[Statement], values: dict) -> list[tirx.Stmt]:
    values, stmts = dict(values), []
    for statement in statements:
        if isinstance(statement, Store):
            indices = [substitute(index, values) for index in statement.indices]
            stmts.append(
                tirx.BufferStore(statement.buffer, substitute(statement.value, values), indices)
            )
        elif isinstance(statement, Bind):
            var = tirx.Var(statement.var.name, statement.var.ty.dtype)
            stmts.append(tirx.Bind(var, substitute(statement.value, values)))
            values[statement.var] = var
        elif isinstance(statement, If):
            body = sequence(_lowered(statement.body, values))
            otherwise = (
                sequence(_lowered(statement.otherwise, values)) if statement.otherwise else None
            )
            stmts.append(tirx.IfThenElse(substitute(statement.condition, values), body, otherwise))
        else:
            var = tirx.Var(statement.var.name, statement.var.ty.dtype)
            dtype = str(var.ty.dtype)
            start, extent = (
                cast(substitute(expr, values), dtype)
                for expr in (statement.start, statement.extent)
            )
            body = sequence(_lowered(statement.body, {**values, statement.var: var}))
            stmts.append(tirx.For(var, start, extent, tirx.ForKind.SERIAL, body))
    return stmts


def general_block(
    name: str, statements: Sequence[Statement], workspaces: Collection[tirx.Var] = ()
) -> tirx.Stmt:
    """Return a block that runs statements in order.

    Outer loops whose iterations touch different elements of all written buffers, in a separate
    dimension, become spatial axes of the block.

    TVM allocates a workspace within the innermost loop with all its accesses, even where an
    iteration needs values of an earlier one. A load before the loops, which has no effect, keeps
    each of ``workspaces`` out of them. A workspace that is never read must not have such a load:
    TVM would reuse its memory after it.
    """
    axes: list[tuple[Range, int]] = []
    while len(statements) == 1 and isinstance(loop := statements[0], Loop):
        outer = {axis.var for axis, _ in axes}
        if outer & (variables(loop.start) | variables(loop.extent)) or not is_parallel(loop):
            break
        var = tirx.Var(loop.var.name, loop.var.ty.dtype)
        axes.append((Range(var, loop.start, loop.extent), SPATIAL))
        rename = partial(substitute, values={loop.var: var})
        statements = [mapped(statement, rename) for statement in loop.body]
    carried = {store.buffer for store in stores(statements)} & reads(statements)
    kept = [
        tirx.Evaluate(_first(workspace, statements))
        for workspace in workspaces
        if workspace in carried
    ]
    return block(name, axes, sequence([*kept, lowered(statements)]))


def _first(buffer: tirx.Var, statements: Sequence[Statement]) -> tirx.PrimExpr:
    """Return a load of the element that statements write to first, or of the first one where that
    depends on data."""
    store = next(store for store in stores(statements) if store.buffer.same_as(buffer))
    inner = {loop.var: loop.start for loop in walk(statements) if isinstance(loop, Loop)}
    indices = []
    for index in store.indices:
        while set(inner) & variables(index):
            index = substitute(index, inner)
        indices.append(tirx.IntImm(str(index.ty.dtype), 0) if loads(index) else index)
    return load(buffer, indices)


def is_parallel(loop: Loop) -> bool:
    """Tell whether an index of each access of a written buffer determines the variable of a loop.

    It must be the same index of the same dimension in all accesses of a buffer, or they could meet.
    """
    written = {store.buffer for store in stores(loop.body)}
    inner = [
        Range(nested.var, nested.start, nested.extent)
        for nested in walk(loop.body)
        if isinstance(nested, Loop)
    ]
    places: dict[tirx.Var, dict[int, tirx.PrimExpr]] = {}

    def visit(buffer: tirx.Var, indices: Sequence[tirx.PrimExpr]) -> None:
        if buffer in written:
            own = {
                dim: index
                for dim, index in enumerate(indices)
                if not loads(index) and determines(index, loop.var, inner)
            }
            known = places.setdefault(buffer, own)
            places[buffer] = {
                dim: index
                for dim, index in known.items()
                if dim in own and tvm_ffi.structural_equal(index, own[dim])
            }

    for statement in walk(loop.body):
        if isinstance(statement, Store):
            visit(statement.buffer, statement.indices)
        for load in (load for expr in expressions(statement) for load in loads(expr)):
            visit(loaded_buffer(load), load.indices)
    return all(places.values())


def function(
    params: Sequence[tirx.Var], body: Sequence[tirx.Stmt], allocated: Sequence[tirx.Var]
) -> tirx.PrimFunc:
    """Return a function with a root block."""
    extents = {var for param in params if is_buffer_var(param) for var in _extents(param)}
    known = {*extents, *(param for param in params if not is_buffer_var(param))}
    body = with_shared_values(_without_negative_factors(sequence(body), known))
    root = SBlock([], [], [], "root", body, alloc_buffers=list(allocated))
    realize = SBlockRealize([], tirx.const(True, "bool"), root)
    made = with_canonical_loops(tirx.PrimFunc(list(params), realize))
    # A script of the function names its dialect by this attribute.
    return made.with_attr("tirx.noalias", True).with_attr("s_tir", True)


def _extents(buffer: tirx.Var) -> set[tirx.Var]:
    return {var for extent in buffer.shape for var in variables(extent)}


def _without_negative_factors(body: tirx.Stmt, constants: Collection[tirx.Var]) -> tirx.Stmt:
    """Return statements in which no dividend falls as a loop variable rises.

    TVM computes ``(7 - i) % 5`` wrongly within an index. A loop that runs backwards divides such
    numbers.
    """

    def change(node: tirx.PrimExpr) -> tirx.PrimExpr:
        divisor = node.b
        if not isinstance(divisor, tirx.IntImm) or int(divisor) == 0 or loads(node.a):
            return node
        if int(divisor) < 0:  # TVM truncates such a quotient
            opposite = Analyzer().simplify(-node.a), tirx.IntImm(str(node.ty.dtype), -int(divisor))
            if isinstance(node, tirx.FloorMod):
                return -change(tirx.FloorMod(*opposite))
            return change(tirx.FloorDiv(*opposite))
        atoms: dict[tirx.Var, tirx.PrimExpr] = {}

        def named(inner: tirx.PrimExpr) -> tirx.Var:
            var = tirx.Var("quotient", inner.ty.dtype)
            atoms[var] = inner
            return var

        dividend = tvm_ffi.structural_map(
            node.a, ((tirx.FloorDiv, tirx.FloorMod), named), order="pre"
        )
        own = [var for var in variables(dividend) if var not in constants]
        parts = detect_linear_equation(dividend, own) if own else []
        if not len(parts) or not any(isinstance(p, tirx.IntImm) and int(p) < 0 for p in parts[:-1]):
            return node
        one = tirx.IntImm(str(node.ty.dtype), 1)
        dividend = substitute(Analyzer().simplify(-one - dividend), atoms)
        # x % m == m - 1 - (-1 - x) % m, and x // m == -1 - (-1 - x) // m
        if isinstance(node, tirx.FloorMod):
            return divisor - one - tirx.FloorMod(dividend, divisor)
        return -one - tirx.FloorDiv(dividend, divisor)

    return tvm_ffi.structural_map(body, ((tirx.FloorDiv, tirx.FloorMod), change), order="post")


def without_copies(
    statements: Sequence[tirx.Stmt], allocated: Collection[tirx.Var]
) -> list[tirx.Stmt]:
    """Return statements that write to a buffer what they write to an allocated buffer, and copy to
    it as a whole."""
    kept = list(statements)
    for i in range(len(kept) - 1, 0, -1):
        copied = _copied(kept[i])
        if copied is None or copied[0] not in allocated:
            continue
        source, target = copied
        before, after = (
            {var for statement in part for var in variables(statement)}
            for part in (kept[:i], kept[i + 1 :])
        )
        if target not in before and source not in after:
            kept[: i + 1] = [substitute(statement, {source: target}) for statement in kept[:i]]
    return kept


def _copied(statement: tirx.Stmt) -> tuple[tirx.Var, tirx.Var] | None:
    """Return the source and the target of a copy of a whole buffer, without a cast."""
    while isinstance(statement, tirx.For):
        statement = statement.body
    if not isinstance(statement, SBlockRealize) or not is_number(statement.predicate, 1):
        return None
    store, axes = statement.block.body, statement.block.iter_vars
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, BufferLoad):
        return None
    source, target = loaded_buffer(store.value), store.buffer
    places = [axis.var for axis in axes]
    is_whole = same(store.indices, places) and same(store.value.indices, places)
    extents = [axis.dom.extent for axis in axes]
    is_whole = is_whole and all(
        Analyzer().can_prove_equal(cast(a, dtype_of(b)), b)
        for buffer in (source, target)
        for a, b in zip(buffer.shape, extents, strict=True)
    )
    return (source, target) if is_whole and source.dtype == target.dtype else None


def load(buffer: tirx.Var, indices: Sequence) -> tirx.PrimExpr:
    """Return an element of a buffer."""
    return tirx.BufferLoad(buffer, list(indices))
