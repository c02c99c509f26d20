"""Dataflow blocks for a function that has been put together, and the casts that TVM would lose on the way."""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GlobalVar

from .aliases import Memory, writing_functions
from .bindings import bindings_of, without_unused
from .module import normalized

#: What is called in the place of a match_cast that is hidden.
_HIDDEN = "relax_grad.match_cast"


def in_dataflow(function: relax.Function) -> relax.Function:
    """Return a function in as few blocks as there can be, without the bindings that only rename.

    Where ``match_cast`` finds that an extent is one that was known before, TVM writes the one for the other
    from there on, and drops the check: types then disagree with what was computed before. So these
    casts are hidden from it.
    """
    passes = tvm.transform.Sequential(
        [
            relax.transform.ToNonDataflow(),
            # The elements of known tuples are replaced first: done by ConvertToDataflow itself, what
            # replaces them is no output of its block.
            relax.transform.CanonicalizeBindings(),
            relax.transform.ConvertToDataflow(1),
        ]
    )
    function = hide_checks(function)
    return show_checks(passes(tvm.IRModule({GlobalVar("function"): function}))["function"])


def hide_checks(function: relax.Function) -> relax.Function:
    """Return a function in which calls stand for each match_cast to extents that are known before.

    What TVM renames, binds or canonicalizes would treat these extents as new ones.
    """
    checks = _checks(function)
    if not checks:
        return function
    return with_changed_bindings(
        function, lambda each: _hidden(each) if each.var in checks else each
    )


def show_checks(function: relax.Function) -> relax.Function:
    """Undo :func:`hide_checks`."""
    if all(_shown(binding) is binding for binding in bindings_of(function.body)):
        return function
    return with_changed_bindings(function, _shown)


def without_cast(binding: relax.Binding) -> relax.Binding:
    """Return a binding without a match_cast to what is known already."""
    is_cast = isinstance(binding, relax.MatchCast)
    if is_cast and tvm_ffi.structural_equal(binding.ty, binding.value.ty):
        return relax.VarBinding(binding.var, binding.value)
    return binding


def _checks(function: relax.Function) -> set[relax.Var]:
    """Return the variables of casts to types with extents that are defined before."""
    definable = relax.analysis.definable_tir_vars_in_type
    known = {extent for param in function.params for extent in definable(param.ty)}
    found = set()
    for binding in bindings_of(function.body):
        if isinstance(binding, relax.MatchCast):
            if any(extent in known for extent in relax.analysis.tir_vars_in_type(binding.ty)):
                found.add(binding.var)
            known.update(definable(binding.ty))
    return found


def _hidden(binding: relax.MatchCast) -> relax.Binding:
    call = relax.op.call_pure_packed(_HIDDEN, binding.value, ty_args=binding.ty)
    return relax.VarBinding(binding.var, call)


def _shown(binding: relax.Binding) -> relax.Binding:
    value = binding.value
    callee = value.args[0] if isinstance(value, relax.Call) and value.args else None
    if isinstance(callee, relax.ExternFunc) and callee.global_symbol == _HIDDEN:
        return relax.MatchCast(binding.var, value.args[1], value.ty_args[0])
    return binding


def with_changed_bindings(
    function: relax.Function, change: Callable[[relax.Binding], relax.Binding]
) -> relax.Function:
    """Return a function with each binding changed, those of branches too."""

    def changed(seq: relax.SeqExpr) -> relax.SeqExpr:
        blocks = [type(block)([of_binding(b) for b in block.bindings]) for block in seq.blocks]
        return relax.SeqExpr(blocks, seq.body)

    def of_binding(binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if isinstance(value, relax.If):
            branches = map(changed, (value.true_branch, value.false_branch))
            binding = relax.VarBinding(binding.var, relax.If(value.cond, *branches, value.span))
        return change(binding)

    return relax.Function(
        function.params,
        normalized(function.params, changed(function.body)),
        function.ret_ty,
        function.is_pure,
        function.attrs,
    )


def with_changed_blocks(
    mod: tvm.IRModule,
    is_affected: Callable[[relax.Function], bool],
    change: Callable[
        [relax.Function, Memory], Callable[[relax.DataflowBlock], relax.DataflowBlock]
    ],
) -> tvm.IRModule:
    """Return a module with the dataflow blocks of some functions changed, and without unused bindings.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    is_affected : Callable
        Tells whether a function may be changed.
    change : Callable
        Takes such a function and the analysis of its writes; returns the function that changes a block, or returns it
        as it is.
    """
    found = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function) and is_affected(function)
    }
    if not found:
        return mod
    functions, writers = dict(mod.functions_items()), writing_functions(mod)
    for variable, function in found.items():
        changed = change(function, Memory(function, writers))
        blocks = [
            changed(block) if isinstance(block, relax.DataflowBlock) else block
            for block in function.body.blocks
        ]
        if all(new is old for new, old in zip(blocks, function.body.blocks, strict=True)):
            continue
        functions[variable] = without_unused(
            relax.Function(
                function.params,
                normalized(function.params, relax.SeqExpr(blocks, function.body.body)),
                function.ret_ty,
                function.is_pure,
                function.attrs,
                function.span,
            )
        )
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
