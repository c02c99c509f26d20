"""The passes of the pipeline: TVM's stages for CPUs, corrections of their results, and
optimizations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import dropwhile, groupby

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm.relax.backend.cpu_generic import pipeline as stages

from ..ir.aliases import kept_copies, may_write, writing_functions
from ..ir.bindings import bindings_of, renamed, used
from ..ir.compat import constant_value, dtype_of
from ..ir.dataflow import with_changed_bindings
from ..ir.divisions import has_checked_divisions
from ..ir.floats import guard_floats
from ..ir.module import NO_ALIASES, normalized, with_only
from . import passes as own
from .codegen.callees import PrefixSymbols
from .codegen.compile import BeginKernels, CompileFunctions
from .codegen.declarations import Declarations
from .codegen.early import Early
from .passes.casts import repeat_casts
from .passes.declarations import keep_apart
from .passes.donate import WriteToDonated
from .passes.extents import select_extents
from .passes.fusion import fuse_ops, keep_operands, return_operands
from .passes.legalize import legalize_ops
from .passes.reserve import reserve_memory
from .passes.reuse import WriteToLastRead
from .passes.schedule import DeclareSchedules
from .passes.tuples import resolve_tuples
from .passes.unused import remove_unused
from .passes.updates import place_updates
from .storages import PLANS, storages_of


def passes(
    target: tvm.target.Target,
    dispatch: tvm.transform.Pass,
    compile_functions: bool = False,
    declarations: Declarations | None = None,
    symbol_prefix: str = "",
    early: Early | None = None,
) -> Iterator[tvm.transform.Pass]:
    """Yield the passes of the pipeline.

    Parameters
    ----------
    target : tvm.target.Target
        The target of the compilation.
    dispatch : tvm.transform.Pass
        The pass that replaces calls by calls of kernels.
    compile_functions : bool
        Whether the last pass compiles the tensor functions.
    declarations : Declarations, optional
        The declarations that ``dispatch`` adds kernels to, and that scheduled functions are added
        to. The caller generates the remaining functions by :meth:`Declarations.completed` of the
        result.
    symbol_prefix : str
        A prefix for the names of the tensor functions.
    early : Early, optional
        The threads that compile kernels of ``declarations`` while the passes run.
    """
    yield from kernel_passes(target, dispatch)
    if declarations is not None and early is not None:
        yield BeginKernels(target, declarations, early, symbol_prefix)
    yield repeat_casts
    yield from legalize_passes(stages.legalize_passes(target), declarations)
    yield view_reshapes
    yield place_updates
    yield own.FuseSiblings(target)
    yield own.Rematerialize(partial(_peak, target))
    yield own.ReorderForPeakMemory()
    yield allocate_empty_constants
    for step in stages.dataflow_lower_passes(target):
        if step.info.name != "RewriteDataflowReshape":  # done above
            yield step
    yield WriteToDonated()
    yield WriteToLastRead()
    yield remove_unused
    # After the passes that turn copies by reshape into views, because they do not recognise
    # scheduled copies.
    if declarations is None:
        yield own.ScheduleLoops(target)
    else:
        yield DeclareSchedules(target, declarations.scheduled)
    yield _guard_floats
    yield own.ShareStorage()
    for step in stages.finalize_passes(target):
        yield step
        if step.info.name == "KillAfterLastUse":
            yield reserve_memory
    yield _without_aliases
    if symbol_prefix:
        yield PrefixSymbols(symbol_prefix)
    if compile_functions:
        yield CompileFunctions(target, declarations, early)
        if symbol_prefix:
            yield PrefixSymbols(symbol_prefix)  # CompileFunctions may add a function


def kernel_passes(
    target: tvm.target.Target, dispatch: tvm.transform.Pass | None = None
) -> Iterator[tvm.transform.Pass]:
    """Yield the first passes of the pipeline: those that replace calls by calls of kernels and of
    TVM's functions.

    Parameters
    ----------
    target : tvm.target.Target
        The target of the compilation.
    dispatch : tvm.transform.Pass, optional
        The pass that replaces calls by calls of kernels; by default ``DispatchKernels``.
    """
    yield from joining_passes()
    yield from stages.library_dispatch_passes(target)
    yield dispatch or own.DispatchKernels(target)


def joining_passes() -> Iterator[tvm.transform.Pass]:
    """Yield the passes that join and divide operators, for any processor."""
    yield own.LiftBranches()
    yield own.InlineSingleUse()
    yield own.JoinSlices()
    yield own.JoinProducts()
    yield own.DivideSlices()


def _peak(target: tvm.target.Target, mod: tvm.IRModule, name: str) -> int:
    """Return the bytes that the passes after Rematerialize plan for a function without symbolic
    extents."""
    mod = relax.transform.DeadCodeElimination()(with_only(mod, [name]))
    behind = dropwhile(
        lambda step: not isinstance(step, own.Rematerialize),
        passes(target, own.DispatchKernels(target)),
    )
    next(behind)
    for step in behind:
        if not isinstance(step, own.ScheduleLoops):  # it changes loops only
            mod = step(mod)
        if step.info.name == PLANS:
            break
    return sum(storages_of(mod, name, {}))


def legalize_passes(
    steps: Iterable[tvm.transform.Pass], declarations: Declarations | None = None
) -> Iterator[tvm.transform.Pass]:
    """Yield TVM's passes from legalization to fused functions of loops, with corrections.

    Parameters
    ----------
    steps : Iterable[tvm.transform.Pass]
        TVM's passes.
    declarations : Declarations, optional
        The declarations in the module.
    """
    for step in steps:
        if step.info.name == "FoldConstant":
            if declarations is not None:
                yield _complete_on_constants(declarations)
            # little remains for TVM's pass, which compiles each call separately
            yield own.FoldConstants()
        if step.info.name == "AnnotateTIROpPattern":
            yield keep_apart
        if step.info.name == "FuseOps":
            yield _in_order_of_writes
            yield _in_order_of_extents
            yield return_operands
        yield _OWN.get(step.info.name, step)
        if step.info.name == "LegalizeOps":
            yield select_extents
        if step.info.name in ("LegalizeOps", "FuseTIR"):
            yield _close_dataflow_blocks
        if step.info.name == "FuseOps":
            # Only a tuple within a block is resolved.
            yield keep_operands
            yield _inline_tuple_reads
            yield resolve_tuples


def _complete_on_constants(declarations: Declarations) -> tvm.transform.Pass:
    """Return the pass that generates the kernels that FoldConstant runs."""

    @tvm.transform.module_pass(opt_level=0, name="relax_grad.CompleteOnConstants")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return declarations.completed_on_constants(mod)

    return run


@tvm.transform.module_pass(opt_level=0, name="relax_grad.GuardFloats")
def _guard_floats(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Keep TVM's passes after the pipeline from simplifying floating-point numbers as real ones."""
    return guard_floats(mod)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.CloseDataflowBlocks")
def _close_dataflow_blocks(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Let dataflow blocks return all variables that are used outside of them.

    If an operator joins the tensors of a tuple that an earlier block returns, legalization uses the
    tensors themselves, which that block does not return. FuseTIR does the same if a function takes
    such a tuple.
    """
    functions = (f for f in mod.functions.values() if isinstance(f, relax.Function))
    if not any(map(_has_open_block, functions)):
        return mod
    passes = [relax.transform.ToNonDataflow(), relax.transform.ConvertToDataflow(1)]
    return tvm.transform.Sequential(passes)(mod)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ViewReshapes")
def view_reshapes(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Replace copies by reshape by views, which take no memory, unless a call writes to the source
    or the copy."""
    changed = relax.transform.RewriteDataflowReshape()(mod)
    functions = dict(changed.functions_items())
    for variable, is_kept in kept_copies(mod).items():
        copies = {b.var: b for b in bindings_of(mod[variable].body) if is_kept(b)}
        if copies and not functions[variable].same_as(mod[variable]):
            functions[variable] = with_changed_bindings(
                functions[variable], partial(_kept_or_changed, copies)
            )
    return tvm.IRModule(functions, attrs=changed.attrs, global_infos=changed.global_infos)


def _kept_or_changed(kept: dict[relax.Var, relax.Binding], binding: relax.Binding) -> relax.Binding:
    return kept.get(binding.var, binding)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.FoldUnwritten")
def _fold_unwritten(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Fold constants with TVM's pass, except in functions where a call may write to a constant, or
    may divide by a constant 0, which would end the process."""
    dividing = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function) and _may_divide(mod, function)
    }
    others = mod
    if dividing:
        kept = {v: f for v, f in mod.functions_items() if v not in dividing}
        others = tvm.IRModule(kept, attrs=mod.attrs, global_infos=mod.global_infos)
    folded = relax.transform.FoldConstant()(others)
    kept = {variable: mod[variable] for variable in kept_copies(mod)}
    functions = {**dict(folded.functions_items()), **kept, **dividing}
    return tvm.IRModule(functions, attrs=folded.attrs, global_infos=folded.global_infos)


def _may_divide(mod: tvm.IRModule, function: relax.Function) -> bool:
    """Tell whether a function calls a tensor function, on constants only, that divides integers by
    numbers of tensors."""
    for binding in bindings_of(function.body):
        value = binding.value
        if not isinstance(value, relax.Call) or len(value.args) != 2:
            continue
        callee, arguments = value.args
        if not isinstance(callee, GlobalVar) or not isinstance(arguments, relax.Tuple):
            continue
        if not all(constant_value(argument) is not None for argument in arguments.fields):
            continue
        called = mod[callee]
        if isinstance(called, tirx.PrimFunc) and has_checked_divisions(called):
            return True
    return False


#: Replacements of TVM's passes, by name.
_OWN = {"FoldConstant": _fold_unwritten, "FuseOps": fuse_ops, "LegalizeOps": legalize_ops}


@tvm.transform.module_pass(opt_level=0, name="relax_grad.InOrderOfWrites")
def _in_order_of_writes(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Remove the dataflow blocks of functions whose dataflow blocks have calls that write to their
    arguments.

    FuseOps moves fused calls to the place of the last one, which may be after a call that writes to
    their operands.
    """
    writers = writing_functions(mod)
    split = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function)
        and any(may_write(binding.value, writers) for binding in _in_dataflow(function.body))
    }
    if not split:
        return mod
    plain = relax.transform.ToNonDataflow()(tvm.IRModule(split))
    functions = {**dict(mod.functions_items()), **dict(plain.functions_items())}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.InOrderOfExtents")
def _in_order_of_extents(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Divide dataflow blocks at the casts that define extents.

    FuseOps orders the calls of a block by their operands. An extent is no operand, so that a call
    that needs an extent may be moved before the cast that defines it.
    """
    divided = {
        variable: _divided(function)
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function)
        and any(map(_finds_extents, bindings_of(function.body)))
    }
    if not divided:
        return mod
    functions = {**dict(mod.functions_items()), **divided}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _finds_extents(binding: relax.Binding) -> bool:
    return isinstance(binding, relax.MatchCast) and bool(
        relax.analysis.definable_tir_vars_in_type(binding.ty)
    )


def _in_dataflow(body: relax.SeqExpr) -> Iterator[relax.Binding]:
    """Yield each binding of the dataflow blocks of a body and its branches."""
    for block in body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from _in_dataflow(binding.value.true_branch)
                yield from _in_dataflow(binding.value.false_branch)
            elif isinstance(block, relax.DataflowBlock):
                yield binding


def _divided(function: relax.Function) -> relax.Function:
    """Return a function in which casts that define extents stand between the dataflow blocks."""
    blocks = [part for block in function.body.blocks for part in _parts(block)]
    body = normalized(function.params, relax.SeqExpr(blocks, function.body.body))
    return relax.Function(
        function.params, body, function.ret_ty, is_pure=function.is_pure, attrs=function.attrs
    )


def _parts(block: relax.BindingBlock) -> list[relax.BindingBlock]:
    """Divide a dataflow block. Variables that another part uses become variables outside of
    dataflow blocks."""
    if not isinstance(block, relax.DataflowBlock):
        return [block]
    parts = [list(bindings) for _, bindings in groupby(block.bindings, _finds_extents)]
    made_in = {binding.var: i for i, part in enumerate(parts) for binding in part}
    shared = [binding.var for binding in block.bindings if _finds_extents(binding)]
    for i, part in enumerate(parts):
        for binding in part:
            shared += [v for v in used(binding.value) if made_in.get(v, i) != i]
    # The results of the block are no dataflow variables and stay, because later blocks use them.
    outer = {v: relax.Var(v.name, v.ty) for v in shared if isinstance(v, relax.DataflowVar)}

    return [
        (relax.BindingBlock if _finds_extents(part[0]) else relax.DataflowBlock)(
            [renamed(binding, outer) for binding in part]
        )
        for part in parts
    ]


@tvm.transform.module_pass(opt_level=0, name="relax_grad.AllocateEmptyConstants")
def allocate_empty_constants(
    mod: tvm.IRModule, _context: tvm.transform.PassContext
) -> tvm.IRModule:
    """Allocate constants without elements at run time.

    TVM's FoldConstant creates such constants, and TVM cannot load some programs with them.
    """
    functions = {
        variable: _Empty(mod).visit_expr(function)
        if isinstance(function, relax.Function)
        else function
        for variable, function in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


@relax.expr_functor.mutator
class _Empty(relax.PyExprMutator):
    def visit_generic_const_(self, constant: relax.Expr) -> relax.Expr:
        value = constant_value(constant)
        if value is None or value.size:
            return constant
        shape = relax.ShapeExpr(value.shape)
        return self.builder_.emit(
            relax.op.builtin.alloc_tensor(shape, dtype_of(constant.ty), runtime_device_index=0)
        )

    visit_constant_ = visit_generic_const_  # the name in TVM 0.26


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


@tvm.transform.module_pass(opt_level=0, name="relax_grad.InlineTupleReads")
def _inline_tuple_reads(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Inline fused functions without calls, which only read an element of a tuple.

    FuseOps creates them for nested tuples that are parameters, and FuseTIR fails on them.
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
    """Mark all tensor functions alike with ``noalias``, including the functions that compute
    shapes.

    TVM's LLVM backend applies the mark of the function with the last name to the whole module. If
    pointers may be aliases, kernels keep their accumulators in memory instead of registers.
    """
    functions = {v: f for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    marks = [bool((f.attrs or {}).get(NO_ALIASES, True)) for f in functions.values()]
    marked = {v: f.with_attr(NO_ALIASES, all(marks)) for v, f in functions.items()}
    return tvm.IRModule(
        {**dict(mod.functions_items()), **marked}, attrs=mod.attrs, global_infos=mod.global_infos
    )


def _is_fused(function: relax.Function) -> bool:
    return function.attrs is not None and bool(function.attrs.get("Primitive", False))


def _computes(function: relax.Function) -> bool:
    return any(isinstance(binding.value, relax.Call) for binding in bindings_of(function.body))
