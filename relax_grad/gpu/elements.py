"""Kernels of element-wise functions with several results: a thread for each element."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx

from ..cpu.schedule import Elementwise, Group, Merged, Pointwise, emit_merged
from ..ir.dtypes import HALVES

#: The threads of a block.
THREADS = 256

_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def may_merge(function: Pointwise) -> bool:
    """Tell whether :func:`schedule_merged` supports a function.

    The arithmetic of half precision is written for CPUs. Integers that a tensor divides are checked
    on the host. A grid has at least one block, so that symbolic extents, which may be 0, are left
    to TVM's rules.
    """
    if not function.is_static or not set(HALVES).isdisjoint(function.dtypes):
        return False
    if any(int(extent) == 0 for param in function.params for extent in param.shape):
        return False
    divisions: list[tirx.PrimExpr] = []
    for nest in function.nests:
        tvm_ffi.structural_walk(nest.value, (_DIVISIONS, divisions.append))
    return all(str(node.ty.dtype).startswith("float") for node in divisions)


def schedule_merged(
    merged: Merged, inputs: Sequence[Hashable], results: Sequence[Hashable]
) -> tirx.PrimFunc:
    """Return a kernel for several merged functions.

    Parameters
    ----------
    merged : Merged
        The merged functions.
    inputs, results : Sequence[Hashable]
        The names of the tensors that the function takes. Other tensors are not stored.
    """
    return emit_merged(merged, inputs, results, _threads)


def _threads(group: Group, _may_share: bool) -> None:
    """Emit the threads of a group. Neighbours in a block take neighbours in memory."""
    size = 1
    for axis in group.nests[0].axes:
        size *= int(axis.extent)
    threads = min(THREADS, -(-size // 32) * 32)
    blocks = -(-size // threads)
    with (
        T.thread_binding(0, blocks, thread="blockIdx.x") as block,
        T.thread_binding(0, threads, thread="threadIdx.x") as thread,
    ):
        place = T.Bind(tirx.Cast("int64", block) * threads + tirx.Cast("int64", thread))
        if size == blocks * threads:
            _element(group, place)
        else:
            with T.If(place < size), T.Then():
                _element(group, place)


def _element(group: Group, place: tirx.PrimExpr) -> None:
    """Emit the element of a group at a place in the order of its axes."""
    loops, at, rest = Elementwise(group), {}, place
    for axis in loops.axes[:0:-1]:
        at[axis.var] = T.Bind(rest % axis.extent)
        rest = T.Bind(rest // axis.extent)
    if loops.axes:
        at[loops.axes[0].var] = rest
    loops.element(at)
