"""Schedules of what has no kernel."""

from __future__ import annotations

import tvm
from tvm import tirx

from ..schedule import schedule
from ..target import CPU

_MARK = "tirx.is_scheduled"


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
                mod.update_func(variable, schedule(function, cpu).with_attr(_MARK, True))
        return mod


def _is_scheduled(function: tirx.PrimFunc) -> bool:
    return function.attrs is not None and bool(function.attrs.get(_MARK, False))
