"""Checks of a function and of its adjoint, each of which raises an error."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm import relax
from tvm.ir import GlobalVar, Op

from ..errors import GradientError
from ..ir.aliases import Memory
from ..ir.bindings import bindings_of, used
from ..tir.call import is_call
from .obstacles import MissingGradient

#: Operators that read only the shapes of their operands.
_OF_SHAPES = frozenset(f"relax.{name}" for name in ("zeros_like", "ones_like", "shape_of"))


def check_closed(adjoint: relax.Function, name: str) -> None:
    """Refuse undefined variables, which TVM would report only when it compiles the function.

    The original function is well-formed, so only a gradient rule can introduce them.
    """
    free = relax.analysis.free_vars(adjoint)
    if free:
        names = ", ".join(sorted({repr(variable.name) for variable in free}))
        raise GradientError(
            f"{name} would use {names}, which neither a binding nor a parameter defines: a "
            "gradient rule returned it; build the result of the rule from its arguments, or bind "
            "it with ctx.emit"
        )


def check_unchanged(
    adjoint: relax.Function,
    forward: Collection[relax.Var],
    active: Collection[relax.Var],
    writers: Collection[GlobalVar],
    func_name: str,
) -> None:
    """Refuse a backward pass that reads a tensor after a call has written to it in place.

    Refuse as well if the forward pass reads such a tensor by its old name after a differentiated
    call: the gradient of the new value would flow to the old one.

    Parameters
    ----------
    adjoint : relax.Function
        The adjoint function.
    forward : Collection[relax.Var]
        The variables that the forward pass binds.
    active : Collection[relax.Var]
        The variables that depend on the sources of the gradient.
    writers : Collection[GlobalVar]
        The functions that write to their arguments.
    func_name : str
        The name of the differentiated function.
    """
    memory = Memory(adjoint, writers)
    bindings = list(bindings_of(adjoint.body))
    written = [
        binding.var
        for binding in bindings
        if binding.var in forward and binding.var in active and is_call(binding.value)
    ]
    read = [
        (variable, binding.var in forward)
        for binding in bindings
        if not _reads_only_shapes(binding.value)
        for variable in used(binding.value)
        if memory.changed(variable, binding.var)
    ]
    results = relax.analysis.free_vars(adjoint.body.body)
    read += [(variable, True) for variable in results if memory.changed_later(variable)]
    for variable, is_forward in read:
        if not is_forward:
            reader = "the gradient needs"
        elif any(memory.shares(variable, other) for other in written):
            reader = "a binding reads"
        else:
            continue
        raise GradientError(
            f"{func_name} cannot be differentiated: {reader} {variable.name!r}, which a call "
            "overwrites in place; pass a copy to the call, or use call_tir instead of "
            "call_tir_inplace"
        )


def _reads_only_shapes(value: relax.Expr) -> bool:
    """Tell whether a value depends only on the shapes of its operands."""
    is_operator = isinstance(value, relax.Call) and isinstance(value.op, Op)
    return is_operator and value.op.name in _OF_SHAPES


def check_gradients(missing: Sequence[MissingGradient], func_name: str) -> None:
    """Raise an error that lists the bindings without a gradient, if there are any."""
    if missing:
        count = "1 binding has" if len(missing) == 1 else f"{len(missing)} bindings have"
        raise GradientError(
            f"{func_name} cannot be differentiated: {count} no gradient:\n"
            + "\n".join(f"- {operator}" for operator in missing)
            + "\n"
            "Register a rule with relax_grad.register_gradient, or name operators in "
            "allow_zero to treat them as constants."
        )
