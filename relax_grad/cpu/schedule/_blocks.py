"""Schedules of single blocks, for functions that do not consist of loop nests only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from ...ir.compat import SBlockRealize
from ..target import CPU
from ._dependence import are_disjoint, is_pure, touched
from ._nest import Axis, loops_of, parts_of

#: Loops with fewer iterations end before a second thread has woken up.
_SMALL = 4096

#: The value assumed for a symbolic extent: a large prime, so that its loop is not split.
_SYMBOLIC = 2**31 - 1

_SPATIAL, _REDUCED = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def schedule_blocks(function: tirx.PrimFunc, cpu: CPU) -> tirx.PrimFunc:
    """Return a function whose blocks are parallel and vectorised if their iterations are independent.

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


def _scheduled(
    function: tirx.PrimFunc, independent: Sequence[tirx.Stmt], cpu: CPU
) -> tirx.PrimFunc:
    """Return a function with its independent blocks scheduled.

    Raises
    ------
    ScheduleError, InternalError
        If TVM's schedules do not support the function, for example a hand-written function with a single block.
    """
    schedule = s_tir.Schedule(function)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if not any(schedule.get(block).same_as(each) for each in independent):
            continue
        kinds = [axis.iter_type for axis in schedule.get(block).iter_vars]
        loops = schedule.get_loops(block)
        if len(loops) == len(kinds):
            # If TVM rejects a step, such as parallel loops that share a result, the block is not scheduled further.
            with contextlib.suppress(s_tir.ScheduleError):
                _schedule_block(schedule, block, loops, kinds, cpu)
    return schedule.mod["main"].with_attrs(function.attrs)


def _independent(function: tirx.PrimFunc) -> list[tirx.Stmt]:
    """Return the blocks below the root, each in its own loops, whose spatial iterations are independent."""
    realize = function.body
    if not isinstance(realize, SBlockRealize) or realize.iter_values:
        return []
    found = map(loops_of, parts_of(realize.block.body))
    return [block for axes, _, block in filter(None, found) if _is_independent(block, axes)]


def _is_independent(block: tirx.Stmt, axes: Sequence[Axis]) -> bool:
    """Tell whether no iteration of the axes reads or writes an element that another iteration writes."""
    if block.match_buffers or not is_pure(block):
        return False
    stores = []
    tvm_ffi.structural_walk(block, (tirx.BufferStore, stores.append))
    written = {store.buffer for store in stores} - set(block.alloc_buffers)
    return all(are_disjoint(touched(block, buffer), axes) for buffer in written)


def _schedule_block(schedule, block, loops, kinds, cpu: CPU) -> None:
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


def _extent(schedule, loop) -> int:
    extent = schedule.get(loop).extent
    return int(extent) if isinstance(extent, tirx.IntImm) else _SYMBOLIC
