"""Horizontal fusion of element-wise functions on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx

from ..cpu.passes.siblings import fused_siblings
from ..cpu.schedule import Merged, Pointwise
from . import elements


@tvm.transform.module_pass(opt_level=0, name="relax_grad.gpu.FuseSiblings")
def fuse_siblings(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Fuse element-wise functions that share inputs into one kernel with several results, as
    :class:`relax_grad.transform.FuseSiblings` does on CPUs.

    One launch computes all results, and reads a shared tensor once.
    """
    return fused_siblings(mod, _OnGPU())


class _OnGPU:
    """The schedules for a GPU."""

    widens = False  # done by widen_halves

    def accepts(self, function: Pointwise) -> bool:
        return elements.may_merge(function)

    def merged(
        self, merged: Merged, inputs: Sequence[int], results: Sequence[int]
    ) -> tirx.PrimFunc:
        return elements.schedule_merged(merged, inputs, results)

    def consumer(self, *_arguments: object) -> None:
        """Products are computed by TVM's schedules, which take no other function in."""
