"""GPU schedules for functions that TVM's default rules for reductions misclassify.

TVM's default GPU pipeline (dlight) tries its rules for matrix products and reductions before the
rule that accepts any kernel. These rules misclassify some of our kernels, which ends in an error or
in a kernel that does not compile. So the legalizations of these kernels bind the threads
themselves, and dlight leaves them alone.

One of these rules is also wrong: if a sum has a single term, it inlines the consumer of the sum
into the initial value of the sum too (0.26 and 0.27).

TVM's code for CUDA is wrong as well: it loads and stores vectors of truth values as 16-bit
integers, while they have 8 bits in memory (0.26 and 0.27). Only the kernels of products have such
vectors, from functions that are fused with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import tvm
from tvm import relax, s_tir, tirx

from ..ir.compat import dtype_of
from ..ir.float32 import in_float32
from ..ir.module import IS_SCHEDULED, OPAQUE
from ..topi.util import is_static, on_gpu, sum_of_parts

#: The threads of a block.
_THREADS = 256

#: Below this number of elements, and from this number of terms on, a block shares the sum of each
#: element.
_FEW, _MANY = 2**14, 2**8

#: The elements that a block computes in TVM's rule for products.
_TILE = 32, 64

#: The multiprocessors of an H100. A product with fewer blocks is divided until it has two for each.
_MULTIPROCESSORS = 132

#: The least terms of a part of a sum.
_TERMS = 128

#: The combiners of TVM's reductions across threads.
_SHARED = (tirx.Add, tirx.Mul, tirx.Max, tirx.Min)


def bind_threads(bb: relax.BlockBuilder, call: relax.Expr, *, always: bool = True) -> relax.Expr:
    """Schedule the function of a ``call_tir``, if it is for a GPU.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder that holds the function.
    call : relax.Expr
        The result of ``bb.call_te``. TVM's legalizations return the call itself if they do not
        support it.
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


def parts_of_product(rows: int, columns: int, terms: Sequence[int]) -> list[int]:
    """Return the numbers of parts into which the sums of a matrix product are divided.

    A product of few elements has few blocks, which leave most of a GPU idle. Equal parts of its
    sums are computed by separate blocks, and added by another kernel, in the same order each
    time.

    Parameters
    ----------
    rows, columns : int
        The extents of the result.
    terms : Sequence[int]
        The extents of the axes of the sums.

    Returns
    -------
    parts : list[int]
        The parts along each axis, divisors of its extent. Empty if the sums are not divided.
    """
    blocks = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    if not 0 < blocks < _MULTIPROCESSORS:
        return []
    most = min(math.ceil(2 * _MULTIPROCESSORS / blocks), max(math.prod(terms) // _TERMS, 1))
    choices = itertools.product(*([d for d in range(1, most + 1) if n % d == 0] for n in terms))
    within = [parts for parts in choices if math.prod(parts) <= most]
    # Parts of the first axis read memory in one piece.
    best = max(within, key=lambda parts: (math.prod(parts), parts))
    return list(best) if math.prod(best) > 1 else []


def add_parts(bb: relax.BlockBuilder, partial: relax.Call, axes: int, dtype: str) -> relax.Expr:
    """Add the parts of sums, of which the results are the leading axes of a tensor.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder that holds the function.
    partial : relax.Call
        The call whose result has the parts.
    axes : int
        The number of leading axes.
    dtype : str
        The dtype of the result.
    """
    name = f"{partial.args[0].name_hint}_sum"
    parts = bb.emit(partial)
    return bind_threads(bb, bb.call_te(sum_of_parts, parts, axes, dtype, primfunc_name_hint=name))


def keep_apart(bb: relax.BlockBuilder, call: relax.Expr) -> relax.Expr:
    """Keep a function from being fused with others, if it is for a GPU.

    TVM's rule for matrix-vector products misidentifies every sum of a product of two tensors,
    whatever their axes, and fails an assertion if the axes do not fit. It does not match a sum over
    some axes that stays apart from its producer.

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


def keep_masks_apart(bb: relax.BlockBuilder, call: relax.Call, legalized: relax.Expr) -> relax.Expr:
    """Keep a function from being fused with others, if it is for a GPU and reads or returns truth
    values.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder that holds the function.
    call : relax.Call
        The call of the operator.
    legalized : relax.Expr
        The call of the function; TVM's legalizations return the operator's if they do not support
        it.

    Returns
    -------
    legalized : relax.Expr
        The same call.
    """
    types = [each.ty for each in (call, *call.args)]
    masks = [isinstance(ty, relax.TensorType) and dtype_of(ty) == "bool" for ty in types]
    return keep_apart(bb, legalized) if any(masks) else legalized


def _schedule(function: tirx.PrimFunc, always: bool) -> tirx.PrimFunc:
    """Bind a thread to each element that a function computes, or a block to each sum that threads
    share.

    A function without a reduction stays as it is: TVM fuses it with others, and schedules it.
    Half precision is computed in float32.
    """
    schedule = s_tir.Schedule(in_float32(function))
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    takes = _reduces if always else _reduces_nothing
    if not any(takes(schedule, block) for block in blocks):
        return function
    for block in _inlined(schedule, blocks):
        if not _is_bound(schedule, block):
            _bind(schedule, block)
    return schedule.mod["main"].with_attrs({IS_SCHEDULED: True, "op_pattern": OPAQUE})


def _reduces(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> bool:
    """Tell whether a block reduces, or contains a reduction over axes that depend on the
    element."""
    kinds, body = _kinds(schedule, block), schedule.get(block).body
    return tirx.IterVar.CommReduce in kinds or (bool(kinds) and isinstance(body, tirx.For))


def _reduces_nothing(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> bool:
    """Tell whether a block reduces over axes of extent 1 only, or over none."""
    stmt = schedule.get(block)
    extents = [
        iter_var.dom.extent
        for iter_var in stmt.iter_vars
        if iter_var.iter_type == tirx.IterVar.CommReduce
    ]
    is_one = all(is_static(extent) and int(extent) == 1 for extent in extents)
    return is_one and stmt.init is not None


def _kinds(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> list[int]:
    return [iter_var.iter_type for iter_var in schedule.get(block).iter_vars]


def _inlined(schedule: s_tir.Schedule, blocks: list) -> list:
    """Inline the blocks that only move or map elements into their consumers; return the other
    blocks."""
    return [block for block in blocks if not _inline(schedule, block)]


def _inline(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> bool:
    try:
        schedule.compute_inline(block)
    except s_tir.ScheduleError:  # the block reduces, or computes a result
        return False
    return True


def _is_bound(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> bool:
    """Tell whether the loops of another block contain a block."""
    loops = schedule.get_loops(block)
    return bool(loops) and schedule.get(loops[0]).thread_binding is not None


def _bind(schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> None:
    """Bind the loops of a block: over its elements or, if threads share a sum, the loops of the
    sum."""
    kinds, loops = _kinds(schedule, block), schedule.get_loops(block)
    if not loops:
        if not isinstance(schedule.get(block).body, tirx.BufferStore):
            return  # statements bind their loops themselves
        loops, kinds = [schedule.add_unit_loop(block)], [tirx.IterVar.DataPar]
    reduced = [
        loop for loop, kind in zip(loops, kinds, strict=True) if kind == tirx.IterVar.CommReduce
    ]
    spatial = [loop for loop in loops if loop not in reduced]
    schedule.reorder(*spatial, *reduced)
    if reduced and _shares_a_sum(schedule, block, spatial, reduced):
        summed = schedule.fuse(*reduced)
        # Thread-local buffers are allocated inside the outermost bound loop.
        outer = schedule.fuse(*spatial) if spatial else schedule.add_unit_loop(summed)
        _, threads = schedule.split(summed, [None, _THREADS])
        schedule.bind(outer, "blockIdx.x")
        schedule.bind(threads, "threadIdx.x")
        return
    blocks, threads = schedule.split(schedule.fuse(*spatial), [None, _THREADS])
    schedule.bind(blocks, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    if reduced:
        _round_within(schedule, block, threads)
        schedule.decompose_reduction(block, reduced[0])


def _round_within(
    schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, threads: s_tir.schedule.LoopRV
) -> None:
    """Let the thread that adds a sum in float32 also round it, instead of another kernel."""
    consumers = schedule.get_consumers(block)
    if len(consumers) != 1 or len(schedule.get_producers(consumers[0])) != 1:
        return
    rounding = schedule.get(consumers[0]).body
    if isinstance(rounding, tirx.BufferStore) and isinstance(rounding.value, tirx.Cast):
        schedule.reverse_compute_at(consumers[0], threads)
        schedule.set_scope(block, 0, "local")


def _shares_a_sum(
    schedule: s_tir.Schedule, block: s_tir.schedule.SBlockRV, spatial: list, reduced: list
) -> bool:
    """Tell whether a block of threads shares a sum: there is one element, or few elements with many
    terms."""
    body = schedule.get(block).body
    if not isinstance(getattr(body, "value", None), _SHARED):
        return False
    elements = _count(schedule, spatial)
    terms = _count(schedule, reduced)
    if elements is None:
        return False
    return elements == 1 or (elements < _FEW and (terms is None or terms >= _MANY))


def _count(schedule: s_tir.Schedule, loops: list) -> int | None:
    """Return the number of steps of nested loops, or None if it is unknown."""
    extents = [schedule.get(loop).extent for loop in loops]
    return math.prod(map(int, extents)) if all(map(is_static, extents)) else None
