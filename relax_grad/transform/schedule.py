"""Schedules of what has no kernel: parallel loops outside, vectors inside."""

from __future__ import annotations

import contextlib
import math

import tvm
from tvm import s_tir, tirx

from ..target import CPU

#: Fewer iterations than this are done before a second thread has woken up.
_SMALL = 4096

#: What a symbolic extent counts as: a large prime, which is not divided up.
_SYMBOLIC = 2**31 - 1

_SPATIAL, _REDUCED = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ScheduleLoops")
class ScheduleLoops:
    """Schedule the loops of every function of tensor expressions that is not scheduled yet.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        What the module will be compiled for; by default the target that is current. A target that LLVM does not
        compile for leaves the module as it is.
    """

    def __init__(self, target: tvm.target.Target | str | dict | None = None):
        self._target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        target = tvm.target.Target.current() if self._target is None else self._target
        cpu = None if target is None else CPU.of(target)
        if cpu is None:
            return mod
        for variable, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc) and not _is_scheduled(function):
                mod.update_func(variable, _scheduled(function, cpu))
        return mod


def _is_scheduled(function: tirx.PrimFunc) -> bool:
    return function.attrs is not None and bool(function.attrs.get("tirx.is_scheduled", False))


def _scheduled(function: tirx.PrimFunc, cpu: CPU) -> tirx.PrimFunc:
    schedule = s_tir.Schedule(function)
    try:
        root = schedule.get_sblock("root")
    except s_tir.ScheduleError:  # written by hand as one block, as a scatter is
        return function
    for block in schedule.get_child_blocks(root):
        kinds = [axis.iter_type for axis in schedule.get(block).iter_vars]
        loops = schedule.get_loops(block)
        if len(loops) == len(kinds) and set(kinds) <= {_SPATIAL, _REDUCED}:
            # What a step refuses, such as parallel loops that share a result, is left as it was.
            with contextlib.suppress(s_tir.ScheduleError):
                _schedule_block(schedule, block, loops, kinds, cpu)
    return schedule.mod["main"].with_attrs(function.attrs).with_attr("tirx.is_scheduled", True)


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
