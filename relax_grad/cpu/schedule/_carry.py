"""Loops that read the result of their last iteration: the value stays in a register.

A processor that loads an element right after it is stored waits several times longer than for an
addition. LLVM keeps the value in a register only for loops of one store.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx

from ...ir.compat import Analyzer, BufferLoad, loaded_buffer, structural_map
from ...ir.expressions import loads, substitute, variables
from ...ir.module import IF_THEN_ELSE
from ._functions import calls_in
from ._nest import parts_of

_STRAIGHT = (tirx.Bind, tirx.BufferStore)


def with_carried_values(statement: tirx.Stmt) -> tirx.Stmt:
    """Return a statement over flat buffers whose innermost loops keep the values that they
    carry."""
    return structural_map(statement, (tirx.For, _with_carried), order="post")


def _with_carried(loop: tirx.For) -> tirx.Stmt:
    body = parts_of(loop.body)
    if not all(isinstance(statement, _STRAIGHT) for statement in body):
        return loop
    for buffer in dict.fromkeys(
        statement.buffer for statement in body if isinstance(statement, tirx.BufferStore)
    ):
        changed = _carried(loop, body, buffer)
        if changed is not None:
            return changed
    return loop


def _carried(loop: tirx.For, body: Sequence[tirx.Stmt], buffer: tirx.Buffer) -> tirx.Stmt | None:
    """Return a loop with the value of a buffer that one iteration leaves to the next, or None if
    there is none."""
    own = {statement.var for statement in body if isinstance(statement, tirx.Bind)}
    stores = [i for i, statement in enumerate(body) if _is_store(statement, buffer)]
    first, last = stores[0], stores[-1]
    (written,) = body[last].indices
    loaded = [
        load
        for statement in body[: first + 1]
        for load in loads(statement.value)
        if loaded_buffer(load).same_as(buffer)
    ]
    if not loaded or variables(written) & own or loads(written):
        return None
    dtype = str(loop.loop_var.ty.dtype)
    now = tirx.Var("now", dtype)
    here = substitute(written, {loop.loop_var: now})
    following = {loop.loop_var: now + tirx.IntImm(dtype, 1)}
    analyzer = Analyzer()
    for load in loaded:
        (index,) = load.indices
        if loads(index) or variables(index) & own:
            continue
        if analyzer.can_prove_equal(substitute(index, following), here):
            break
    else:
        return None
    users = [i for i in range(first + 1) if _reads(body[i], load)]
    if _has_branches(body[users[0]].value):
        return None  # the load may be out of bounds where its branch is not taken
    dtype = str(buffer.dtype)
    carry = tirx.decl_buffer([1], dtype, "carry", layout=None)
    zero = tirx.IntImm("int32", 0)

    def change(node: tirx.PrimExpr) -> tirx.PrimExpr:
        return carry[zero] if _is_same(node, load) else node

    changed: list[tirx.Stmt] = []
    for i, statement in enumerate(body):
        value = statement.value
        if i in users:
            value = structural_map(value, (BufferLoad, change), order="post")
        if i == last:
            result = tirx.Var("carried", dtype)
            changed += [
                tirx.Bind(result, value),
                tirx.BufferStore(buffer, result, [written]),
                tirx.BufferStore(carry, result, [zero]),
            ]
        elif isinstance(statement, tirx.Bind):
            changed.append(tirx.Bind(statement.var, value))
        else:
            changed.append(tirx.BufferStore(statement.buffer, value, statement.indices))
    start = tirx.BufferLoad(buffer, [substitute(load.indices[0], {loop.loop_var: loop.min})])
    initial: tirx.Stmt = tirx.BufferStore(carry, start, [zero])
    if not isinstance(loop.extent, tirx.IntImm):
        is_entered = loop.extent > tirx.IntImm(str(loop.extent.ty.dtype), 0)
        initial = tirx.IfThenElse(is_entered, initial, None)
    inner = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, tirx.SeqStmt(changed))
    return tirx.SeqStmt([tirx.AllocBuffer(carry), initial, inner])


def _is_store(statement: tirx.Stmt, buffer: tirx.Buffer) -> bool:
    return isinstance(statement, tirx.BufferStore) and statement.buffer.same_as(buffer)


def _is_same(node: tirx.PrimExpr, load: tirx.PrimExpr) -> bool:
    return loaded_buffer(node).same_as(loaded_buffer(load)) and tvm_ffi.structural_equal(
        list(node.indices), list(load.indices)
    )


def _reads(statement: tirx.Stmt, load: tirx.PrimExpr) -> bool:
    return any(_is_same(other, load) for other in loads(statement.value))


def _has_branches(value: tirx.PrimExpr) -> bool:
    return any(call.op.same_as(IF_THEN_ELSE) for call in calls_in(value))
