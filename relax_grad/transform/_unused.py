"""Functions without the bindings that nothing uses."""

from __future__ import annotations

from tvm import relax
from tvm.ir import PrimType

from .._aliases import writes_in_place
from .._module import normalized


def without_unused(function: relax.Function) -> relax.Function:
    """Return a function without the pure bindings that nothing uses, at the top level of its body.

    ``relax.analysis.remove_all_unused`` takes quadratic time where many bindings are unused; this is linear. Casts
    stay, which define extents, and so do calls that write to their arguments.
    """
    needed = _needed(function.body.body)
    blocks = []
    for block in reversed(function.body.blocks):
        kept = []
        for binding in reversed(block.bindings):
            if binding.var in needed or not _is_removable(binding):
                needed |= _needed(binding.value)
                kept.append(binding)
        if kept:
            blocks.append(type(block)(kept[::-1], block.span))
    if sum(len(block.bindings) for block in blocks) == sum(
        len(block.bindings) for block in function.body.blocks
    ):
        return function
    body = normalized(function.params, relax.SeqExpr(blocks[::-1], function.body.body))
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def _needed(value: relax.Expr) -> set[relax.Var]:
    """Return the variables that a value uses, those in branches and local functions too."""
    return set(relax.analysis.free_vars(value))


def _is_removable(binding: relax.Binding) -> bool:
    value = binding.value
    if isinstance(binding, relax.MatchCast) or isinstance(binding.var.ty, PrimType):
        return False
    return not (writes_in_place(value) or relax.analysis.contains_impure_call(value))
