"""Schedules of single blocks, for functions that do not consist of loop nests only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

import tvm
from tvm import s_tir, tirx

from ...ir.compat import BufferLoad, SBlockRealize, loaded_buffer, structural_map, structural_walk
from ...ir.expressions import substitute
from ..target import CPU
from ._carry import with_carried_values
from ._dependence import are_disjoint, is_pure, touched
from ._nest import Axis, is_one, is_zero, loops_of, parts_of

#: Loops with fewer iterations end before a second thread has woken up.
_SMALL = 4096

#: The value assumed for a symbolic extent: a large prime, so that its loop is not split.
_SYMBOLIC = 2**31 - 1

_SPATIAL, _REDUCED = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def schedule_blocks(function: tirx.PrimFunc, cpu: CPU) -> tirx.PrimFunc:
    """Return a function whose blocks are parallel and vectorised if their iterations are
    independent.

    Other blocks keep their loops and their order.
    """
    independent = _independent(function)
    if not independent:
        return function
    try:
        return _scheduled(function, independent, cpu)
    # TVM's region analysis fails on some reads with data-dependent indices.
    except (s_tir.ScheduleError, tvm.error.InternalError):
        return function


def over_flat_buffers(statement: tirx.Stmt, rows: Mapping[tirx.Buffer, tirx.Buffer]) -> tirx.Stmt:
    """Return a statement over flat buffers and without blocks.

    Its outermost long loop is parallel if its iterations are independent. The elements of an
    iteration are computed one after another.

    Parameters
    ----------
    statement : tirx.Stmt
        A statement for which :func:`._nest.is_plain` holds.
    rows : Mapping[tirx.Buffer, tirx.Buffer]
        The flat buffers over the memory of the buffers of the statement.
    """
    loops = loops_of(statement)
    is_parallel = False
    if loops is not None and not loops[1] and loops[0]:
        axes, _, block = loops
        work = math.prod(axis.size or _SYMBOLIC for axis in axes) * _iterations(block.body)
        is_parallel = work >= _SMALL and _is_independent(block, axes)

    def load(node: tirx.PrimExpr) -> tirx.PrimExpr:
        buffer = loaded_buffer(node)
        return rows[buffer][_place(buffer, node.indices)]

    def store(node: tirx.Stmt) -> tirx.Stmt:
        return tirx.BufferStore(rows[node.buffer], node.value, [_place(node.buffer, node.indices)])

    rules = [(BufferLoad, load), (tirx.BufferStore, store), (SBlockRealize, _without_block)]
    statement = with_carried_values(structural_map(statement, rules, order="post"))
    return _parallel(statement) if is_parallel else statement


def _place(buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
    """Return the index of an element in row-major order."""
    place = tirx.IntImm("int64", 0)
    for index, extent in zip(indices, buffer.shape, strict=True):
        place = place * tirx.Cast("int64", extent) + tirx.Cast("int64", index)
    return place


def _without_block(realize: SBlockRealize) -> tirx.Stmt:
    """Return the statements of a block with the values of its variables."""
    block, body = realize.block, realize.block.body
    if block.init is not None:
        first = [axis.var == axis.dom.min for axis in block.iter_vars if axis.iter_type == _REDUCED]
        init = tirx.IfThenElse(tirx.all(*first), block.init, None) if first else block.init
        body = tirx.SeqStmt([init, body])
    if not is_one(realize.predicate):
        body = tirx.IfThenElse(realize.predicate, body, None)
    values = [axis.var for axis in block.iter_vars], realize.iter_values
    return substitute(body, dict(zip(*values, strict=True)))


def _parallel(loop: tirx.For) -> tirx.For:
    """Return a loop, or the first one within it that has several iterations, as a parallel one."""
    kind, body = tirx.ForKind.PARALLEL, loop.body
    if _size(loop.extent) == 1 and isinstance(body, tirx.For):
        kind, body = loop.kind, _parallel(body)
    return tirx.For(loop.loop_var, loop.min, loop.extent, kind, body)


def _scheduled(
    function: tirx.PrimFunc, independent: Sequence[tirx.Stmt], cpu: CPU
) -> tirx.PrimFunc:
    """Return a function with its independent blocks scheduled.

    Raises
    ------
    ScheduleError, InternalError
        If TVM's schedules do not support the function, for example a hand-written function with a
        single block.
    """
    schedule = s_tir.Schedule(function)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if not any(schedule.get(block).same_as(statement) for statement in independent):
            continue
        kinds = [axis.iter_type for axis in schedule.get(block).iter_vars]
        loops = schedule.get_loops(block)
        if len(loops) == len(kinds):
            # If TVM rejects a step, such as parallel loops that share a result, the block is not
            # scheduled further.
            with contextlib.suppress(s_tir.ScheduleError):
                _schedule_block(schedule, block, loops, kinds, cpu)
    return schedule.mod["main"].with_attrs(function.attrs)


def _independent(function: tirx.PrimFunc) -> list[tirx.Stmt]:
    """Return the blocks below the root, each in its own loops, whose spatial iterations are
    independent."""
    realize = function.body
    if not isinstance(realize, SBlockRealize) or realize.iter_values:
        return []
    nests = map(loops_of, parts_of(realize.block.body))
    return [block for axes, _, block in filter(None, nests) if _is_independent(block, axes)]


def _is_independent(block: tirx.Stmt, axes: Sequence[Axis]) -> bool:
    """Tell whether no iteration of the axes reads or writes an element that another iteration
    writes."""
    if block.match_buffers or not is_pure(block):
        return False
    stores: list[tirx.BufferStore] = []
    structural_walk(block, (tirx.BufferStore, stores.append))
    written = {store.buffer for store in stores} - set(block.alloc_buffers)
    inner = [Axis(loop.loop_var, loop.extent) for loop in _loops(block) if is_zero(loop.min)]
    return all(are_disjoint(touched(block, buffer), axes, inner) for buffer in written)


def _schedule_block(
    schedule: s_tir.Schedule,
    block: s_tir.schedule.SBlockRV,
    loops: Sequence,
    kinds: Sequence,
    cpu: CPU,
) -> None:
    """Order the loops of one block: parallel loops, reduction loops, and the vector loop."""
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _SPATIAL]
    reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _REDUCED]
    if not spatial:
        return
    small = math.prod(_extent(schedule, loop) for loop in loops) < _SMALL
    # The vector loop needs an extent above 1: in a 1x1 image, only the channels can fill a vector.
    inner = next((loop for loop in spatial[::-1] if _extent(schedule, loop) > 1), spatial[-1])
    outer = [loop for loop in spatial if loop is not inner]
    lanes = math.gcd(_extent(schedule, inner), cpu.lanes)
    if 1 < lanes < _extent(schedule, inner):
        rest, inner = schedule.split(inner, [None, lanes])
        outer.append(rest)
    schedule.reorder(*outer, *reduced, inner)
    if outer and not small:
        schedule.parallel(schedule.fuse(*outer))
    if reduced:
        # LLVM vectorises the inner loop only without the test for the first term of a sum.
        schedule.decompose_reduction(block, reduced[0])


def _extent(schedule: s_tir.Schedule, loop: s_tir.schedule.LoopRV) -> int:
    return _size(schedule.get(loop).extent)


def _size(extent: tirx.PrimExpr) -> int:
    return int(extent) if isinstance(extent, tirx.IntImm) else _SYMBOLIC


def _iterations(body: tirx.Stmt) -> int:
    """Return the product of the extents of the loops in a statement, a bound of its iterations."""
    return math.prod(_size(loop.extent) for loop in _loops(body))


def _loops(body: tirx.Stmt) -> list[tirx.For]:
    loops: list[tirx.For] = []
    structural_walk(body, (tirx.For, loops.append))
    return loops
