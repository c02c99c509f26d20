"""Branches of conditionals, moved into functions of their own."""

from __future__ import annotations

from tvm import relax


def lift_branches(bb: relax.BlockBuilder, function: relax.Function, name: str) -> relax.Function:
    """Return a function whose conditionals only choose which private function to call.

    TVM plans the memory of a function as if each of its branches were taken: storage that one branch
    allocates is used again behind it and in other conditionals, and the process crashes where that
    branch was not taken. A branch that is a function of its own shares no storage.

    Parameters
    ----------
    bb : relax.BlockBuilder
        Where the new functions are added.
    function : relax.Function
        A function without dataflow blocks.
    name : str
        What the names of the new functions begin with.
    """
    blocks = [_lifted(bb, block, name) for block in function.body.blocks]
    if all(new is old for new, old in zip(blocks, function.body.blocks, strict=True)):
        return function
    body = relax.SeqExpr(blocks, function.body.body)
    bb.begin_scope(list(function.params))
    body = bb.normalize(body)
    bb.end_scope()
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
                _call(bb, branch, f"{name}_{which}")
                for branch, which in ((value.true_branch, "then"), (value.false_branch, "else"))
            ]
            binding = relax.VarBinding(binding.var, relax.If(value.cond, *branches, value.span))
        bindings.append(binding)
    return relax.BindingBlock(bindings)


def _call(bb: relax.BlockBuilder, branch: relax.SeqExpr, name: str) -> relax.SeqExpr:
    """Return a call of a new function that does what a branch does."""
    branch = relax.SeqExpr([_lifted(bb, block, name) for block in branch.blocks], branch.body)
    # Extents count as free variables too, but the type of a result cannot depend on a parameter that is
    # an integer.
    alone = relax.Function([], branch, branch.body.ty)
    extents = set(relax.analysis.free_symbolic_vars(alone))
    arguments = [v for v in relax.analysis.free_vars(branch) if v not in extents]
    params = list(arguments)
    bb.begin_scope(params)
    branch = bb.normalize(branch)
    bb.end_scope()
    hidden = relax.analysis.free_symbolic_vars(relax.Function(params, branch, is_pure=True))
    if hidden:  # extents that no parameter has as a dimension of its own
        arguments.insert(0, relax.ShapeExpr(list(hidden)))
        params.insert(0, relax.Var("extents", relax.ShapeType(list(hidden))))
    function = relax.utils.copy_with_new_vars(relax.Function(params, branch, is_pure=True))
    callee = bb.add_func(function, name)
    return relax.SeqExpr([], bb.normalize(relax.Call(callee, arguments)))


def copy_branch(branch: relax.SeqExpr) -> relax.SeqExpr:
    """Return a branch with variables of its own; symbolic extents from outside stay what they are."""
    alone = relax.Function([], branch, branch.ty)
    hidden = list(relax.analysis.free_symbolic_vars(alone))
    if not hidden:
        return relax.utils.copy_with_new_vars(alone).body
    extents = relax.Var("extents", relax.ShapeType(hidden))
    copied = relax.utils.copy_with_new_vars(relax.Function([extents], branch, branch.ty))
    renamed = dict(zip(copied.params[0].ty.values, hidden, strict=True))
    return copied.bind_symbolic_vars(renamed).body
