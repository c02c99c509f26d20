"""Schedules of functions of tensor expressions for CPUs: everything that has no kernel.

A function is read as nests of loops (``_nest``), nests are fused (``_fuse``), loops that go through memory as one
become one (``_access``), and new loops are emitted (``_emit``, ``_reduce``). What cannot be read so is scheduled block by block
(``_blocks``).
"""

from __future__ import annotations

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.script.ir_builder import IRBuilder

from .._compat import loaded_buffer
from ..kernel._builder import scopes
from ..target import CPU
from ._blocks import schedule_blocks
from ._emit import Elements
from ._fuse import flat, fuse
from ._nest import is_buffer, nests_of, product
from ._reduce import Reduction

__all__ = ["schedule"]


def schedule(function: tirx.PrimFunc, cpu: CPU) -> tirx.PrimFunc:
    """Return a function that computes the same in parallel and in vectors.

    Sums are added in an order that does not depend on the number of threads.

    Parameters
    ----------
    function : tirx.PrimFunc
        A function of tensor expressions, possibly fused ones.
    cpu : CPU
        What it will run on.
    """
    found = nests_of(function)
    if found is None:
        return schedule_blocks(function, cpu)
    nests, allocated = found
    if any("bfloat16" in str(nest.buffer.dtype) or _loads_bfloat16(nest) for nest in nests):
        return function  # TVM replaces its arithmetic later, and only knows the forms that it makes itself
    groups = fuse(nests, allocated)
    used = {nest.buffer for group in groups for nest in group.nests}
    with IRBuilder() as builder, T.prim_func(), scopes():
        T.func_name("scheduled")
        rows = {
            param: T.decl_buffer(
                [product(param.shape)], str(param.dtype), data=param.data, layout=None
            )
            for param in function.params
            if is_buffer(param)
        }
        for buffer in allocated:
            if buffer in used:
                rows[buffer] = T.alloc_buffer(
                    [product(buffer.shape)], str(buffer.dtype), layout=None
                )
        for group in groups:
            kind = Reduction if group.nests[0].combine else Elements
            kind(flat(group, rows), cpu).emit()
    return tirx.PrimFunc(
        function.params, builder.get().body, function.ret_type, attrs=function.attrs
    )


def _loads_bfloat16(nest) -> bool:
    return any("bfloat16" in str(loaded_buffer(load).dtype) for load in nest.loads)
