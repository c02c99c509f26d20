"""CPU schedules of tensor expression functions that have no kernel.

A function is parsed into loop nests (``_nest``), nests are fused (``_fuse``), and loops over
contiguous memory are joined (``_access``). Then new loops are emitted: over elements
(``_elements``), over more memory than caches hold (``_stream``), and for reductions (``_reduce``),
with arithmetic instead of calls of the C library (``_functions``). Several element-wise functions
can be merged into one first (``_merge``), and may consume the tiles of a matrix product
(``_product_consumers``). A statement that is no nest, such as a scan, keeps its loops between those
of the nests, and functions with other effects are scheduled block by block (``_blocks``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import tvm.tirx.script.builder as T
from tvm import tirx
from tvm.script.ir_builder import IRBuilder

from ...ir.compat import loaded_buffer
from ...ir.expressions import loads
from ...ir.module import IN_PLACE, is_buffer
from ..kernel.language.builder import block, scopes
from ..target import CPU
from ._blocks import over_flat_buffers, schedule_blocks
from ._elements import Elements
from ._emitter import Elementwise
from ._functions import calls_in
from ._fuse import Group, flat, fuse
from ._halves import widened_sections, with_params
from ._identities import name_of
from ._in_place import Shareable, for_in_place, in_place, in_place_pairs
from ._indices import as_analyzable
from ._merge import Merged, Part, Pointwise, merge, pointwise
from ._nest import Nest, product, sections_of, stored
from ._product_consumers import schedule_consumer
from ._reduce import Reduction
from ._stream import Stream

__all__ = [
    "Elementwise",
    "Group",
    "Merged",
    "Part",
    "Pointwise",
    "Shareable",
    "emit_merged",
    "in_place",
    "merge",
    "pointwise",
    "product",
    "schedule",
    "schedule_consumer",
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
    parts = sections_of(function)
    wide = None if parts is None else widened_sections(parts[0], function.params, parts[1])
    if wide is None:
        return as_analyzable(schedule_blocks(function, cpu))
    sections, params, allocated = wide
    groups = _grouped(sections, allocated)
    body = _emitted(params, groups, allocated, _loops_for(cpu), "scheduled")
    body = with_params(body, params, function.params)
    return as_analyzable(
        tirx.PrimFunc(function.params, body, function.ret_type, attrs=function.attrs)
    )


def _grouped(
    sections: Sequence[Nest | tirx.Stmt], allocated: Sequence[tirx.Buffer]
) -> list[Group | tirx.Stmt]:
    """Return the groups of each run of nests, and the other statements, in order."""
    runs: list[list[Nest] | tirx.Stmt] = []
    for section in sections:
        if not isinstance(section, Nest):
            runs.append(section)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(section)
        else:
            runs.append([section])
    used = [_touched(run) for run in runs]
    groups: list[Group | tirx.Stmt] = []
    for i, run in enumerate(runs):
        if isinstance(run, list):
            elsewhere = {buffer for j, buffers in enumerate(used) if j != i for buffer in buffers}
            groups += fuse(run, [buffer for buffer in allocated if buffer not in elsewhere])
        else:
            groups.append(run)
    return groups


def _touched(run: list[Nest] | tirx.Stmt) -> set[tirx.Buffer]:
    """Return the buffers that nests or a statement read and write."""
    if isinstance(run, list):
        return {buffer for nest in run for buffer in (nest.buffer, *nest.operands)}
    return {*stored(run), *map(loaded_buffer, loads(run))}


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
    return emit_merged(merged, inputs, results, _loops_for(cpu))


def emit_merged(
    merged: Merged,
    inputs: Sequence[Hashable],
    results: Sequence[Hashable],
    emit: Callable[[Group, bool], None],
) -> tirx.PrimFunc:
    """Return a function for several merged functions.

    Parameters
    ----------
    merged, inputs, results : Merged, Sequence[Hashable], Sequence[Hashable]
        As for :func:`schedule_merged`.
    emit : Callable
        ``emit(group, may_share)`` emits the loops of a group over flat buffers. With ``may_share``,
        results may later be written to the memory of inputs.
    """
    params = [merged.buffers[name] for name in (*inputs, *results)]
    dropped = [name for name in merged.buffers if name not in {*inputs, *results}]
    allocated = [*merged.allocated, *(merged.buffers[name] for name in dropped)]
    groups = merged.groups(dropped)
    if len(groups) == 1:
        groups = [for_in_place(groups[0])]
    pairs = []
    if len(groups) == 1:
        pairs = in_place_pairs(groups[0], params[: len(inputs)], params[len(inputs) :])
    body = _emitted(params, groups, allocated, emit, "merged", may_share=bool(pairs))
    originals = [merged.original(name) for name in (*inputs, *results)]
    function = tirx.PrimFunc(originals, with_params(body, params, originals))
    attrs = {"tirx.noalias": True, **({IN_PLACE: pairs} if pairs else {})}
    return function.with_attrs(attrs)


def _emitted(
    params: Sequence[tirx.Var],
    groups: Sequence[Group | tirx.Stmt],
    allocated: Sequence[tirx.Buffer],
    emit: Callable[[Group, bool], None],
    name: str,
    may_share: bool = False,
) -> tirx.Stmt:
    """Return a block with the loops of groups, over flat buffers in place of parameters and
    allocated buffers.

    With ``may_share``, results may later be written to the memory of inputs. It is a block because
    TVM's detection of reshapes expects one in a function of one argument.
    """
    used = {
        buffer
        for group in groups
        for buffer in _touched(list(group.nests) if isinstance(group, Group) else group)
    }
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
                if isinstance(group, Group):
                    emit(flat(group, rows), may_share)
                else:
                    T.add_to_parent(over_flat_buffers(group, rows))
    body = builder.get().body
    names = {name_of(call) for call in calls_in(body)}
    unknown = sorted(name for name in names if name.startswith("relax_grad."))
    if unknown:  # The linker would not find them, and the first call would end the process.
        raise NotImplementedError(f"no arithmetic was emitted for {', '.join(unknown)}")
    return body


def _loops_for(cpu: CPU) -> Callable[[Group, bool], None]:
    """Return the function that emits the loops of a group for a CPU."""

    def emit(group: Group, may_share: bool) -> None:
        if group.nests[0].combine:
            Reduction(group, cpu).emit()
            return
        stream = Stream(group, cpu, may_share)
        (stream if stream.is_worth_it else Elements(group, cpu)).emit()

    return emit
