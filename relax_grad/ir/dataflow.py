"""Dataflow blocks of constructed functions, without the loss of casts in TVM's passes."""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GlobalVar

from .aliases import Memory, writing_functions
from .bindings import bindings_of, with_function_body, without_unused
from .module import normalized

#: The name of the external function whose calls represent hidden casts.
_HIDDEN = "relax_grad.match_cast"


def in_dataflow(function: relax.Function) -> relax.Function:
    """Return a function with as few blocks as possible, and without bindings that only rename.

    If a ``match_cast`` equates an extent with one that was known before, TVM replaces one by the
    other from there on and drops the check. Types then disagree with the types of earlier values.
    Therefore these casts are hidden from TVM.
    """
    passes = tvm.transform.Sequential(
        [
            relax.transform.ToNonDataflow(),
            # Replace the elements of known tuples first. If ConvertToDataflow replaced them, the
            # replacements would not be outputs of their block.
            relax.transform.CanonicalizeBindings(),
            relax.transform.ConvertToDataflow(1),
        ]
    )
    hidden = hide_checks(function)
    transformed = passes(tvm.IRModule({GlobalVar("function"): hidden}))["function"]
    return transformed if hidden is function else show_checks(transformed)


def hide_checks(function: relax.Function) -> relax.Function:
    """Return a function in which calls replace each ``match_cast`` to extents that are already
    known.

    TVM's functions that rename, bind or canonicalize would treat these extents as new ones.
    """
    checks = _checks(function)
    if not checks:
        return function
    return with_changed_bindings(
        function, lambda value: _hidden(value) if value.var in checks else value
    )


def show_checks(function: relax.Function) -> relax.Function:
    """Undo :func:`hide_checks`."""
    if all(_shown(binding) is binding for binding in bindings_of(function.body)):
        return function
    return with_changed_bindings(function, _shown)


def without_cast(binding: relax.Binding) -> relax.Binding:
    """Return a binding without its ``match_cast`` if the value already has the type of the cast."""
    is_cast = isinstance(binding, relax.MatchCast)
    if is_cast and tvm_ffi.structural_equal(binding.ty, binding.value.ty):
        return relax.VarBinding(binding.var, binding.value)
    return binding


def _checks(function: relax.Function) -> set[relax.Var]:
    """Return the variables of casts to types with extents that are already defined."""
    definable = relax.analysis.definable_tir_vars_in_type
    known = {extent for param in function.params for extent in definable(param.ty)}
    variables = set()
    for binding in bindings_of(function.body):
        if isinstance(binding, relax.MatchCast):
            if any(extent in known for extent in relax.analysis.tir_vars_in_type(binding.ty)):
                variables.add(binding.var)
            known.update(definable(binding.ty))
    return variables


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
    """Return a function with each binding changed, including those in branches."""
    return with_changed_lists(function, lambda bindings: list(map(change, bindings)))


def with_changed_lists(
    function: relax.Function, change: Callable[[list[relax.Binding]], list[relax.Binding]]
) -> relax.Function:
    """Return a function with the bindings of each block changed, including blocks in branches."""

    def changed(seq: relax.SeqExpr) -> relax.SeqExpr:
        blocks = [
            type(block)(change([of_branches(b) for b in block.bindings[:]]))
            for block in seq.blocks[:]
        ]
        return relax.SeqExpr(blocks, seq.body)

    def of_branches(binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if not isinstance(value, relax.If):
            return binding
        branches = map(changed, (value.true_branch, value.false_branch))
        return relax.VarBinding(binding.var, relax.If(value.cond, *branches, value.span))

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
    """Return a module with changed dataflow blocks in some functions, and without unused bindings
    in these.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    is_affected : Callable
        Tells whether a function may be changed.
    change : Callable
        Takes such a function and the analysis of its writes. Returns a callable that takes a block
        and returns a changed block or the same one.
    """
    affected = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function) and is_affected(function)
    }
    if not affected:
        return mod
    functions, writers = dict(mod.functions_items()), writing_functions(mod)
    for variable, function in affected.items():
        changed = change(function, Memory(function, writers))
        blocks = [
            changed(block) if isinstance(block, relax.DataflowBlock) else block
            for block in function.body.blocks[:]
        ]
        if all(new is old for new, old in zip(blocks, function.body.blocks, strict=True)):
            continue
        functions[variable] = without_unused(
            with_function_body(
                function, normalized(function.params, relax.SeqExpr(blocks, function.body.body))
            )
        )
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
