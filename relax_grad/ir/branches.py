"""The extraction of the branches of conditionals into functions."""

from __future__ import annotations

from tvm import relax
from tvm.ir import GlobalVar, PrimType

from ..errors import GradientError
from .arguments import copy_function
from .bindings import used
from .dataflow import in_dataflow, without_cast
from .module import copy_with_new_vars, normalized


def lift_branches(bb: relax.BlockBuilder, function: relax.Function, name: str) -> relax.Function:
    """Return a function whose conditionals only select the private function to call.

    TVM plans the memory of a function as if each of its branches were taken. Storage that one
    branch allocates is reused after the conditional and in other conditionals, and the process
    crashes if that branch was not taken. A branch in a separate function shares no storage.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder of the module that the new functions are added to.
    function : relax.Function
        A function without dataflow blocks.
    name : str
        The prefix of the names of the new functions.
    """
    blocks = [_lifted(bb, block, name) for block in function.body.blocks]
    if all(new is old for new, old in zip(blocks, function.body.blocks, strict=True)):
        return function
    body = normalized(function.params, relax.SeqExpr(blocks, function.body.body), bb)
    return relax.Function(
        function.params, body, function.ret_ty, is_pure=function.is_pure, attrs=function.attrs
    )


def _lifted(bb: relax.BlockBuilder, block: relax.BindingBlock, name: str) -> relax.BindingBlock:
    if not any(isinstance(binding.value, relax.If) for binding in block.bindings):
        return block
    bindings = []
    for binding in block.bindings:
        value = binding.value
        if isinstance(value, relax.If):
            branches = [
                branch if only_calls(branch) else _call(bb, branch, f"{name}_{which}")
                for branch, which in ((value.true_branch, "then"), (value.false_branch, "else"))
            ]
            binding = relax.VarBinding(binding.var, relax.If(value.cond, *branches, value.span))
        bindings.append(binding)
    return relax.BindingBlock(bindings)


def only_calls(branch: relax.SeqExpr) -> bool:
    """Tell whether a branch allocates nothing: it only calls functions of the module or names
    variables."""
    return all(
        isinstance(binding.value, relax.Var)
        or (isinstance(binding.value, relax.Call) and isinstance(binding.value.op, GlobalVar))
        for block in branch.blocks
        for binding in block.bindings
    ) and isinstance(branch.body, relax.Var)


def _call(bb: relax.BlockBuilder, branch: relax.SeqExpr, name: str) -> relax.SeqExpr:
    """Return a branch that calls a new function with the body of the original branch."""
    blocks = [relax.BindingBlock(list(map(without_cast, b.bindings))) for b in branch.blocks]
    branch = relax.SeqExpr([_lifted(bb, block, name) for block in blocks], branch.body)
    free = list(relax.analysis.free_vars(branch))
    # TVM may count explicit extents among the variables.
    params = [variable for variable in free if not isinstance(variable.ty, PrimType)]
    branch = normalized(params, branch, bb)
    hidden = relax.analysis.free_symbolic_vars(relax.Function(params, branch, is_pure=True))
    known = relax.analysis.defined_symbolic_vars(relax.Function(params, branch, is_pure=True))
    is_pure = not relax.analysis.contains_impure_call(branch)
    params += [v for v in free if not any(v.same_as(other) for other in [*params, *hidden, *known])]
    arguments = list(params)
    if hidden:  # extents that no parameter has as a whole dimension
        arguments.insert(0, relax.ShapeExpr(list(hidden)))
        params.insert(0, relax.Var("extents", relax.ShapeType(list(hidden))))
    function = in_dataflow(relax.Function(params, branch, is_pure=is_pure))
    callee = bb.add_func(copy_with_new_vars(function), name)
    return relax.SeqExpr([], bb.normalize(relax.Call(callee, arguments)))


def copy_branch(branch: relax.SeqExpr) -> relax.SeqExpr:
    """Return a copy of a branch with new variables. Symbolic extents from outside stay the same."""
    function = relax.Function([], branch, branch.ty)
    # The extents that its casts seem to define may also come from outside.
    return copy_function(function, relax.analysis.defined_symbolic_vars(function)).body


def without_effects(branch: relax.SeqExpr) -> relax.SeqExpr:
    """Return a branch without the calls that have only side effects, so that it can be computed
    again.

    Raises
    ------
    GradientError
        If a result of an impure call is used, because a second call may return another result.
    """
    if not relax.analysis.contains_impure_call(branch):
        return branch
    bindings = [binding for block in branch.blocks for binding in block.bindings]
    needed = {*used(branch.body), *(v for b in bindings for v in relax.analysis.free_vars(b.value))}
    kept = []
    for binding in bindings:
        variable, value = binding.var, binding.value
        if isinstance(value, relax.If):
            branches = map(without_effects, (value.true_branch, value.false_branch))
            binding = relax.VarBinding(variable, relax.If(value.cond, *branches, value.span))
        elif relax.analysis.contains_impure_call(value):
            if variable in needed:
                raise GradientError(
                    f"binding {variable.name!r}: the adjoint of a conditional computes its "
                    "branches again, but an impure call may return another result the second "
                    "time; move the call out of the conditional"
                )
            continue
        kept.append(binding)
    return relax.SeqExpr([relax.BindingBlock(kept)], branch.body)
