"""GPU schedules of what TVM's default rules for reductions take for something that it is not.

TVM's default GPU pipeline (dlight) tries rules for matrix products and reductions before the one that takes
any kernel. Some of our kernels look to these rules like what they are made for, and end in an error or in a
kernel that does not compile. So their legalizations bind the threads themselves, and dlight leaves them
alone.

One of these rules is also wrong: where a sum has a single term, what follows it is inlined into its initial
value too (0.26 and 0.27).
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, s_tir, tirx

from ..ir.module import IS_SCHEDULED, OPAQUE
from ..topi.util import is_static, on_gpu

#: The threads of a block.
_THREADS = 256

#: Elements that are few enough, and terms that are many enough, to let a block share each element.
_FEW, _MANY = 2**14, 2**10

#: What TVM's reductions across threads combine with.
_SHARED = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)


def bind_threads(bb: relax.BlockBuilder, call: relax.Expr, *, always: bool = True) -> relax.Expr:
    """Schedule the function of a ``call_tir``, if it is for a GPU.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder that holds the function.
    call : relax.Expr
        What ``bb.call_te`` has returned; TVM's legalizations return the call itself where they refuse it.
    always : bool
        False leaves a function to TVM's rules unless it has a sum of a single term.

    Returns
    -------
    call : relax.Expr
        The same call.
    """
    variable = call.args[0]
    if on_gpu() and isinstance(variable, tvm.ir.GlobalVar):
        bb.update_func(variable, _schedule(bb.get()[variable], always))
    return call


def keep_apart(bb: relax.BlockBuilder, call: relax.Expr) -> relax.Expr:
    """Keep a sum over some axes from being fused with what it sums, if it is for a GPU.

    TVM's rule for matrix-vector products takes a sum of a product of two tensors for one, whatever their
    axes are, and ends in an assertion where they do not fit. A sum of a single tensor is none.

    Parameters
    ----------
    bb, call
        As for :func:`bind_threads`.

    Returns
    -------
    call : relax.Expr
        The same call.
    """
    variable = call.args[0]
    if on_gpu() and isinstance(variable, tvm.ir.GlobalVar):
        bb.update_func(variable, bb.get()[variable].with_attr("op_pattern", OPAQUE))
    return call


def _schedule(function: tirx.PrimFunc, always: bool) -> tirx.PrimFunc:
    """Give each element of what a function computes a thread, and a sum to a scalar those of a block.

    A function that reduces nothing stays as it is: TVM fuses it with others, and schedules it.
    """
    schedule = s_tir.Schedule(function)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    takes = _reduces if always else _reduces_nothing
    if not any(takes(schedule, block) for block in blocks):
        return function
    for block in _inlined(schedule, blocks):
        _bind(schedule, block)
    return schedule.mod["main"].with_attrs({IS_SCHEDULED: True, "op_pattern": OPAQUE})


def _reduces(schedule: s_tir.Schedule, block) -> bool:
    """Tell whether a block reduces, or holds one that does: its axes depend on the element."""
    kinds, body = _kinds(schedule, block), schedule.get(block).body
    return tirx.IterVar.CommReduce in kinds or (bool(kinds) and isinstance(body, tirx.For))


def _reduces_nothing(schedule: s_tir.Schedule, block) -> bool:
    """Tell whether a block reduces over axes of extent 1, or over none."""
    stmt = schedule.get(block)
    extents = [
        iter_var.dom.extent
        for iter_var in stmt.iter_vars
        if iter_var.iter_type == tirx.IterVar.CommReduce
    ]
    one = all(is_static(extent) and int(extent) == 1 for extent in extents)
    return one and stmt.init is not None


def _kinds(schedule: s_tir.Schedule, block) -> list[int]:
    return [iter_var.iter_type for iter_var in schedule.get(block).iter_vars]


def _inlined(schedule: s_tir.Schedule, blocks: list) -> list:
    """Inline what only moves or maps elements into what reads it; return the blocks that are left."""
    return [block for block in blocks if not _inline(schedule, block)]


def _inline(schedule: s_tir.Schedule, block) -> bool:
    try:
        schedule.compute_inline(block)
    except s_tir.ScheduleError:  # it reduces, or it is a result
        return False
    return True


def _bind(schedule: s_tir.Schedule, block) -> None:
    """Bind the loops of a block: those over its elements or, of a single element, those of its sum."""
    kinds, loops = _kinds(schedule, block), schedule.get_loops(block)
    if not loops:
        if not isinstance(schedule.get(block).body, tirx.BufferStore):
            return  # statements, which bind their loops themselves
        loops, kinds = [schedule.add_unit_loop(block)], [tirx.IterVar.DataPar]
    reduced = [
        loop for loop, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.CommReduce
    ]
    spatial = [loop for loop in loops if loop not in reduced]
    schedule.reorder(*spatial, *reduced)
    if reduced and _shares_a_sum(schedule, block, spatial, reduced):
        summed = schedule.fuse(*reduced)
        # What a thread keeps to itself is allocated within the outermost bound loop.
        outer = schedule.fuse(*spatial) if spatial else schedule.add_unit_loop(summed)
        _, threads = schedule.split(summed, [None, _THREADS])
        schedule.bind(outer, "blockIdx.x")
        schedule.bind(threads, "threadIdx.x")
        return
    blocks, threads = schedule.split(schedule.fuse(*spatial), [None, _THREADS])
    schedule.bind(blocks, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    if reduced:
        schedule.decompose_reduction(block, reduced[0])


def _shares_a_sum(schedule: s_tir.Schedule, block, spatial: list, reduced: list) -> bool:
    """Tell whether the threads of a block reduce to one element: to the only one, or few of many terms."""
    body = schedule.get(block).body
    if not isinstance(getattr(body, "value", None), _SHARED):
        return False
    elements = _count(schedule, spatial)
    terms = _count(schedule, reduced)
    few_of_many = None not in (elements, terms) and elements < _FEW and terms >= _MANY
    return elements == 1 or few_of_many


def _count(schedule: s_tir.Schedule, loops: list) -> int | None:
    """Return the number of steps of nested loops, or None where it is not known."""
    extents = [schedule.get(loop).extent for loop in loops]
    return math.prod(map(int, extents)) if all(map(is_static, extents)) else None
