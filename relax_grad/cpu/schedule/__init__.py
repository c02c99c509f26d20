"""CPU schedules of tensor expression functions that have no kernel.

A function is parsed into loop nests (``_nest``), nests are fused (``_fuse``), and loops over contiguous memory are
joined (``_access``). Then new loops are emitted: over elements (``_emit``), over more memory than caches hold
(``_stream``), and for reductions (``_reduce``), with arithmetic instead of calls of the C library (``_functions``).
Several element-wise functions can be merged into one first (``_merge``). Functions that cannot be parsed into nests are
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
    """Return an equivalent function that is parallel and vectorised.

    The order of additions does not depend on the number of threads.

    Parameters
    ----------
    function : tirx.PrimFunc
        A function of tensor expressions, possibly fused ones.
    cpu : CPU
        The target CPU.
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
    """Return a parallel and vectorised function for several merged functions.

    Parameters
    ----------
    merged : Merged
        The merged functions.
    inputs, results : Sequence[Hashable]
        The names of the tensors that the function takes. Other tensors are not stored.
    cpu : CPU
        The target CPU.
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
    """Return a block with the loops of groups, over flat buffers in place of parameters and allocated buffers.

    It is a block because TVM's detection of reshapes expects one in a function of one argument.
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
