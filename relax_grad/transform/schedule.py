"""Schedules of what has no kernel."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx.buffer import BufferType

from .._compat import dtype_of, replace_attrs
from .._module import IS_SCHEDULED, SCHEDULED_ATTRS
from ..schedule import schedule
from ..target import CPU
from ._target import TargetPass


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ScheduleLoops")
class ScheduleLoops(TargetPass):
    """Schedule the loops of every function of tensor expressions that is not scheduled yet.

    The functions rely on no alignment of their tensors but that of the elements: one of PyTorch may begin anywhere.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        What the module will be compiled for; by default the target that is current. A target that LLVM does not
        compile for leaves the module as it is.
    """

    def _transformed(self, mod: tvm.IRModule, cpu: CPU) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        for variable, function in functions.items():
            if isinstance(function, tirx.PrimFunc) and not _is_scheduled(function):
                scheduled = _unaligned(schedule(function, cpu))
                functions[variable] = scheduled.with_attrs(SCHEDULED_ATTRS)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _is_scheduled(function: tirx.PrimFunc) -> bool:
    return function.attrs is not None and bool(function.attrs.get(IS_SCHEDULED, False))


def _unaligned(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function without what TVM takes for granted: that tensors begin at multiples of 64 bytes."""

    def of_elements(kind: BufferType) -> BufferType:
        return replace_attrs(kind, data_alignment=max(1, tvm_ffi.dtype(dtype_of(kind)).itemsize))

    return tvm_ffi.structural_map(function, (BufferType, of_elements))
