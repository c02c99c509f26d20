"""Kernels of element-wise functions with several results: a thread for each element."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx

from ..cpu.schedule import Elementwise, Group, Merged, Pointwise, emit_merged, product

#: The threads of a block.
THREADS = 256

_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def may_merge(function: Pointwise) -> bool:
    """Tell whether :func:`schedule_merged` supports a function.

    Integers that a tensor divides are checked on the host.
    """
    extents = [extent for param in function.params for extent in param.shape]
    if any(isinstance(extent, tirx.IntImm) and int(extent) == 0 for extent in extents):
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
    """Emit the threads of a group. Neighbours in a block take neighbours in memory.

    A grid has at least one block, also if a symbolic extent is 0.
    """
    size = product([axis.extent for axis in group.nests[0].axes])
    if isinstance(size, tirx.IntImm):
        size = int(size)
        threads = min(THREADS, -(-size // 32) * 32)
        blocks = -(-size // threads)
    else:
        threads, blocks = THREADS, tirx.max(tirx.ceildiv(size, THREADS), 1)
    with (
        T.thread_binding(0, blocks, thread="blockIdx.x") as block,
        T.thread_binding(0, threads, thread="threadIdx.x") as thread,
    ):
        place = T.Bind(tirx.Cast("int64", block) * threads + tirx.Cast("int64", thread))
        if isinstance(size, int) and size == blocks * threads:
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
