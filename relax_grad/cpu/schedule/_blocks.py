"""Schedules of blocks, one by one: of functions that are not nests of loops throughout."""

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

#: Fewer iterations than this are done before a second thread has woken up.
_SMALL = 4096

#: What a symbolic extent counts as: a large prime, which is not divided up.
_SYMBOLIC = 2**31 - 1

_SPATIAL, _REDUCED = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def schedule_blocks(function: tirx.PrimFunc, cpu: CPU) -> tirx.PrimFunc:
    """Return a function whose blocks run in parallel and in vectors, where their iterations are independent.

    Others are left as they are, in the order in which they were written.
    """
    independent = _independent(function)
    if not independent:
        return function
    try:
        return _scheduled(function, independent, cpu)
    # TVM's analysis of regions fails on some that are read at places that depend on data.
    except (s_tir.ScheduleError, tvm.error.InternalError):
        return function


def _scheduled(
    function: tirx.PrimFunc, independent: Sequence[tirx.Stmt], cpu: CPU
) -> tirx.PrimFunc:
    """Return a function in which independent blocks are scheduled.

    Raises
    ------
    ScheduleError, InternalError
        If TVM's schedules do not take the function, as one that was written by hand as one block.
    """
    schedule = s_tir.Schedule(function)
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if not any(schedule.get(block).same_as(each) for each in independent):
            continue
        kinds = [axis.iter_type for axis in schedule.get(block).iter_vars]
        loops = schedule.get_loops(block)
        if len(loops) == len(kinds):
            # What a step refuses, such as parallel loops that share a result, is left as it was.
            with contextlib.suppress(s_tir.ScheduleError):
                _schedule_block(schedule, block, loops, kinds, cpu)
    return schedule.mod["main"].with_attrs(function.attrs)


def _independent(function: tirx.PrimFunc) -> list[tirx.Stmt]:
    """Return the blocks below the root whose spatial iterations are independent, each in loops of its own."""
    realize = function.body
    if not isinstance(realize, SBlockRealize) or realize.iter_values:
        return []
    found = map(loops_of, parts_of(realize.block.body))
    return [block for axes, _, block in filter(None, found) if _is_independent(block, axes)]


def _is_independent(block: tirx.Stmt, axes: Sequence[Axis]) -> bool:
    """Tell whether what different elements of axes write, they alone read and write."""
    if block.match_buffers or not is_pure(block):
        return False
    stores = []
    tvm_ffi.structural_walk(block, (tirx.BufferStore, stores.append))
    written = {store.buffer for store in stores} - set(block.alloc_buffers)
    return all(are_disjoint(touched(block, buffer), axes) for buffer in written)


def _schedule_block(schedule, block, loops, kinds, cpu: CPU) -> None:
    """Order the loops of one block: parallel ones, those of the sum, and one for vectors."""
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _SPATIAL]
    reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _REDUCED]
    if not spatial:
        return
    small = math.prod(_extent(schedule, loop) for loop in loops) < _SMALL
    # Of a 1x1 image only the channels can fill a vector.
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
        # LLVM makes vectors of the inner loop once it no longer asks whether a sum has begun.
        schedule.decompose_reduction(block, reduced[0])


def _extent(schedule, loop) -> int:
    extent = schedule.get(loop).extent
    return int(extent) if isinstance(extent, tirx.IntImm) else _SYMBOLIC
