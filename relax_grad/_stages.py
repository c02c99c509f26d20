"""The passes of the pipeline: TVM's stages for CPUs, what puts right their results, and what makes programs fast."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax, tirx
from tvm.relax.backend.cpu_generic import pipeline as stages

from . import transform
from .activity import bindings_of
from .transform.memory import writes_in_place


def passes(
    target: tvm.target.Target, dispatch: transform.DispatchKernels
) -> Iterator[tvm.transform.Pass]:
    """Yield the passes of the pipeline.

    Parameters
    ----------
    target : tvm.target.Target
        What to compile for.
    dispatch : DispatchKernels
        What puts kernels in the place of calls.
    """
    yield transform.LiftBranches()
    yield transform.InlineOnlyCalls()
    yield from stages.library_dispatch_passes(target)
    yield dispatch
    yield from _legalize_passes(target)
    # What copies by reshape becomes views, which take no memory.
    yield relax.transform.RewriteDataflowReshape()
    yield transform.MergeElements(target)
    yield transform.OrderForMemory()
    yield from stages.dataflow_lower_passes(target)
    # Behind what turns copies by reshape into views: it would not know a scheduled one.
    yield transform.ScheduleLoops(target)
    yield transform.ShareStorage()
    yield from stages.finalize_passes(target)
    yield _without_aliases


def _legalize_passes(target: tvm.target.Target) -> Iterator[tvm.transform.Pass]:
    """Yield TVM's passes from legalization to fused functions of loops."""
    for each in stages.legalize_passes(target):
        if each.info.name == "FoldConstant":
            yield transform.FoldConstants()  # which leaves little to TVM's, that compiles what it folds one by one
        if each.info.name == "FuseOps":
            yield _in_order_of_writes
        yield each
        if each.info.name in ("LegalizeOps", "FuseTIR"):
            yield _close_dataflow_blocks
        if each.info.name == "FuseOps":
            yield _inline_what_computes_nothing


@tvm.transform.module_pass(opt_level=0, name="relax_grad.CloseDataflowBlocks")
def _close_dataflow_blocks(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Let dataflow blocks return all that is used outside of them.

    Legalizing what joins the tensors of a tuple that an earlier block returns puts in its place the tensors, which
    that block does not return. So does FuseTIR where a function takes such a tuple.
    """
    functions = (f for f in mod.functions.values() if isinstance(f, relax.Function))
    if not any(map(_has_open_block, functions)):
        return mod
    passes = [relax.transform.ToNonDataflow(), relax.transform.ConvertToDataflow(1)]
    return tvm.transform.Sequential(passes)(mod)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.InOrderOfWrites")
def _in_order_of_writes(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Leave functions whose calls write to their arguments without dataflow blocks.

    FuseOps computes what it fuses where the last part stood, behind a call that writes to what another part reads.
    """
    found = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function)
        and any(writes_in_place(binding.value) for binding in bindings_of(function.body))
    }
    if not found:
        return mod
    plain = relax.transform.ToNonDataflow()(tvm.IRModule(found))
    functions = {**dict(mod.functions_items()), **dict(plain.functions_items())}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _has_open_block(function: relax.Function) -> bool:
    """Tell whether a variable of a dataflow block is used outside of it."""
    before: set[relax.Var] = set()
    for block in function.body.blocks:
        if any(
            before.intersection(relax.analysis.all_vars(binding.value))
            for binding in block.bindings
        ):
            return True
        before.update(b.var for b in block.bindings if isinstance(b.var, relax.DataflowVar))
    return not before.isdisjoint(relax.analysis.all_vars(function.body.body))


@tvm.transform.module_pass(opt_level=0, name="relax_grad.InlineWhatComputesNothing")
def _inline_what_computes_nothing(
    mod: tvm.IRModule, _context: tvm.transform.PassContext
) -> tvm.IRModule:
    """Inline fused functions that only take an element of a tuple.

    FuseOps makes them of nested tuples that are parameters, and FuseTIR fails on them.
    """
    functions = {v: f for v, f in mod.functions_items() if isinstance(f, relax.Function)}
    empty = {v: f for v, f in functions.items() if _is_fused(f) and not _computes(f)}
    if not empty:
        return mod
    kept = {
        variable: function.inline_functions(empty) if variable in functions else function
        for variable, function in mod.functions_items()
        if variable not in empty
    }
    return relax.transform.Normalize()(tvm.IRModule(kept, attrs=mod.attrs))


@tvm.transform.module_pass(opt_level=0, name="relax_grad.WithoutAliases")
def _without_aliases(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Mark functions of one pointer, those that compute shapes, as functions whose pointers are no aliases.

    TVM's LLVM backend takes what the last function is, by name, for all functions of a module. Where others may
    have aliases, kernels do not hold what they sum up in registers.
    """
    marked = {
        variable: function.with_attr("tirx.noalias", True)
        if isinstance(function, tirx.PrimFunc) and len(function.params) == 1
        else function
        for variable, function in mod.functions_items()
    }
    return tvm.IRModule(marked, attrs=mod.attrs, global_infos=mod.global_infos)


def _is_fused(function: relax.Function) -> bool:
    return function.attrs is not None and bool(function.attrs.get("Primitive", False))


def _computes(function: relax.Function) -> bool:
    return any(isinstance(binding.value, relax.Call) for binding in bindings_of(function.body))
