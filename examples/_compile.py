"""Compile for the CPU with loops that run in parallel and in vectors.

TVM's default pipeline leaves a tensor expression's loops as they were written: serial, with a sum
innermost, which no vector unit can add up in another order. One rule for every loop nest is enough
to train a small network: the outer loops of what is computed in parallel, a loop for the vectors
innermost, and the loops of a sum in between. LLVM then makes the vectors.
"""

from __future__ import annotations

import contextlib
import math

import tvm
from tvm import relax, s_tir, tirx
from tvm.relax.backend.cpu_generic import pipeline as stages
from tvm.target.codegen import llvm_get_system_cpu

_LANES = 16  # The float32 numbers in one AVX-512 register; LLVM divides them up for narrower ones.
_SMALL = 4096  # Fewer iterations than this are done before a second thread has woken up.
_SPATIAL, _REDUCED = tirx.IterVar.DataPar, tirx.IterVar.CommReduce
_SYMBOLIC = 2**31 - 1


def host_target() -> tvm.target.Target:
    """Return the target of this machine's processor with all its vector units."""
    return tvm.target.Target({"kind": "llvm", "mcpu": llvm_get_system_cpu()})


def compile_module(module: tvm.IRModule, target: tvm.target.Target) -> relax.VirtualMachine:
    """Compile a module and load it on the target's device."""
    pipeline = _cpu_pipeline(target) if target.kind.name == "llvm" else "default"
    device = tvm.runtime.Device(target.get_target_device_type(), 0)
    executable = tvm.compile(module, target=target, relax_pipeline=pipeline)
    return relax.VirtualMachine(executable, device)


def _cpu_pipeline(target: tvm.target.Target) -> tvm.transform.Pass:
    """Return TVM's pipeline for CPUs with the schedules added after fusion."""

    @tvm.transform.module_pass(opt_level=0, name="TrainingPipeline")
    def pipeline(module, _context):
        with target:
            return tvm.transform.Sequential(
                [
                    *stages.library_dispatch_passes(target),
                    *stages.legalize_passes(target),
                    schedule_loops,
                    *stages.dataflow_lower_passes(target),
                    *stages.finalize_passes(target),
                ]
            )(module)

    return pipeline


@tvm.transform.module_pass(opt_level=0, name="ScheduleLoops")
def schedule_loops(module: tvm.IRModule, _context) -> tvm.IRModule:
    """Schedule every loop nest of every PrimFunc that the rule fits; leave the others alone."""
    for global_var, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            module[global_var] = _schedule(function)
    return module


def _schedule(function: tirx.PrimFunc) -> tirx.PrimFunc:
    schedule = s_tir.Schedule(function)
    try:
        root = schedule.get_sblock("root")
    except s_tir.ScheduleError:  # Written by hand as one block, as a scatter is.
        return function
    for block in schedule.get_child_blocks(root):
        kinds = [axis.iter_type for axis in schedule.get(block).iter_vars]
        loops = schedule.get_loops(block)
        if len(loops) == len(kinds) and set(kinds) <= {_SPATIAL, _REDUCED}:
            # What a step refuses, such as parallel loops that share a result, is left as it was.
            with contextlib.suppress(s_tir.ScheduleError):
                _schedule_block(schedule, block, loops, kinds)
    return schedule.mod["main"].with_attrs(function.attrs)


def _schedule_block(schedule, block, loops, kinds) -> None:
    """Order the loops of one block: parallel ones, those of the sum, and one for vectors."""
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _SPATIAL]
    reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _REDUCED]
    if not spatial:
        return
    small = math.prod(_extent(schedule, loop) for loop in loops) < _SMALL
    # Of a 1x1 image only the channels can fill a vector.
    inner = next((loop for loop in spatial[::-1] if _extent(schedule, loop) > 1), spatial[-1])
    outer = [loop for loop in spatial if loop is not inner]
    lanes = math.gcd(_extent(schedule, inner), _LANES)
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
    """Return a loop's extent; a symbolic one counts as a large prime, which is not divided up."""
    extent = schedule.get(loop).extent
    return int(extent) if isinstance(extent, tirx.IntImm) else _SYMBOLIC
