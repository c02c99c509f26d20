"""An order of bindings in which some results are ready as early as possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm import relax

from .bindings import used


def in_order_of_readiness(
    bindings: Sequence[relax.Binding], wanted: Collection[relax.Var], kept: Collection[relax.Var]
) -> list[relax.Binding]:
    """Return bindings in an order in which those that serve one of the wanted results only come
    directly after their operands.

    All other bindings keep their order.

    Parameters
    ----------
    bindings : Sequence[relax.Binding]
        Bindings without calls that write to their operands.
    wanted : Collection[relax.Var]
        The variables of the results.
    kept : Collection[relax.Var]
        Further variables that are used after the bindings.
    """
    serves = _served(bindings, set(wanted), kept)
    defined = {binding.var: i for i, binding in enumerate(bindings)}
    #: For each binding, the one after which it comes, or itself.
    places: list[int] = []
    extents = -1
    for i, binding in enumerate(bindings):
        place = i
        if isinstance(binding, relax.MatchCast):
            extents = i  # later types may name the extents that it defines
        elif serves[i]:
            operands = [
                places[defined[operand]] for operand in _operands(binding) if operand in defined
            ]
            if operands:
                place = min(i, max(*operands, extents))
        places.append(place)
    return [bindings[i] for i in sorted(range(len(bindings)), key=lambda i: (places[i], i))]


def _served(
    bindings: Sequence[relax.Binding], wanted: set[relax.Var], kept: Collection[relax.Var]
) -> list[bool]:
    """Tell for each binding whether exactly one of the wanted results depends on it, and nothing
    else."""
    several = object()
    serves: dict[relax.Var, object] = dict.fromkeys(kept, several)
    is_single = [False] * len(bindings)
    for i in reversed(range(len(bindings))):
        variable = bindings[i].var
        by = variable if variable in wanted else serves.get(variable, several)
        is_single[i] = by is not several
        for operand in _operands(bindings[i]):
            if serves.setdefault(operand, by) is not by:
                serves[operand] = several
    return is_single


def _operands(binding: relax.Binding) -> list[relax.Var]:
    value = binding.value
    is_nested = isinstance(value, relax.If | relax.Function)
    return list(relax.analysis.free_vars(value)) if is_nested else used(value)


__all__ = ["in_order_of_readiness"]
