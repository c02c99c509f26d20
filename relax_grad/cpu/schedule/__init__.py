"""Schedules of functions of tensor expressions for CPUs: everything that has no kernel.

A function is read as nests of loops (``_nest``), nests are fused (``_fuse``), loops that go through memory as one
become one (``_access``), and new loops are emitted: over elements (``_emit``), over more memory than caches hold
(``_stream``), and of reductions (``_reduce``), with arithmetic in the place of functions of the C library
(``_functions``). Several functions of elements can become one first (``_merge``). What cannot be read as nests is
scheduled block by block (``_blocks``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.script.ir_builder import IRBuilder

from ...ir.module import is_buffer
from ..kernel.builder import block, scopes
from ..target import CPU
from ._blocks import schedule_blocks
from ._emit import Elements
from ._fuse import Group, flat, fuse
from ._indices import as_analyzable
from ._merge import Merged, Part, Pointwise, merge, pointwise
from ._nest import nests_of, product
from ._reduce import Reduction
from ._stream import Stream

__all__ = [
    "Part",
    "Pointwise",
    "merge",
    "pointwise",
    "schedule",
    "schedule_merged",
]


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
        return as_analyzable(schedule_blocks(function, cpu))
    nests, allocated = found
    body = _emitted(function.params, fuse(nests, allocated), allocated, cpu, "scheduled")
    return as_analyzable(
        tirx.PrimFunc(function.params, body, function.ret_type, attrs=function.attrs)
    )


def schedule_merged(
    merged: Merged, inputs: Sequence[Hashable], results: Sequence[Hashable], cpu: CPU
) -> tirx.PrimFunc:
    """Return the function that computes what several did, in parallel and in vectors.

    Parameters
    ----------
    merged : Merged
        What they compute.
    inputs, results : Sequence[Hashable]
        The tensors that the function takes. Others are not stored.
    cpu : CPU
        What it will run on.
    """
    params = [merged.buffers[name] for name in (*inputs, *results)]
    dropped = [name for name in merged.buffers if name not in {*inputs, *results}]
    allocated = [*merged.allocated, *(merged.buffers[name] for name in dropped)]
    body = _emitted(params, merged.groups(dropped), allocated, cpu, "merged")
    return tirx.PrimFunc(params, body).with_attr("tirx.noalias", True)


def _emitted(
    params: Sequence[tirx.Var],
    groups: Sequence[Group],
    allocated: Sequence[tirx.Buffer],
    cpu: CPU,
    name: str,
) -> tirx.Stmt:
    """Return a block of the loops of groups, over rows in the place of the parameters and of what is allocated.

    It is a block because TVM looks into one to tell whether a function of one argument is a reshape.
    """
    used = {nest.buffer for group in groups for nest in group.nests}
    with IRBuilder() as builder, T.prim_func():
        T.func_name("scheduled")
        with block(name), scopes():
            rows = {
                param: T.decl_buffer(
                    [product(param.shape)], str(param.dtype), data=param.data, layout=None
                )
                for param in params
                if is_buffer(param)
            }
            for buffer in allocated:
                if buffer in used:
                    rows[buffer] = T.alloc_buffer(
                        [product(buffer.shape)], str(buffer.dtype), layout=None
                    )
            for group in groups:
                _emit_group(flat(group, rows), cpu)
    return builder.get().body


def _emit_group(group: Group, cpu: CPU) -> None:
    if group.nests[0].combine:
        Reduction(group, cpu).emit()
        return
    stream = Stream(group, cpu)
    (stream if stream.is_worth_it else Elements(group, cpu)).emit()
