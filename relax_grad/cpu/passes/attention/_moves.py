"""Chains of reshapes and permutations around products, as ``einsum`` and ``bmm`` leave them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

from tvm import relax
from tvm.ir import Op
from tvm.relax import op

from ._shapes import are_equal_shapes, extents_of, is_one

_PERMUTE = Op.get("relax.permute_dims")
_RESHAPES = tuple(
    Op.get(f"relax.{name}") for name in ("reshape", "expand_dims", "squeeze", "flatten")
)


def is_move(call: relax.Expr | None) -> TypeGuard[relax.Call]:
    """Tell whether a call is a reshape or a permutation of axes."""
    return isinstance(call, relax.Call) and (call.op == _PERMUTE or call.op in _RESHAPES)


def source_of(
    expr: relax.Expr, used_once: Callable[[relax.Expr], relax.Call | None]
) -> relax.Call | None:
    """Return the call that computes the elements of a tensor in the same order, before reshapes and
    permutations that keep it together; None if there is none, or a tensor between has other
    uses."""
    call, pending = used_once(expr), None
    while is_move(call):
        if call.op != _PERMUTE:
            if pending is not None:
                return None
        else:
            axes, extents = _axes(call), extents_of(call.args[0])
            pending = axes if pending is None else [axes[axis] for axis in pending]
            if extents is not None and _keeps_order(pending, extents):
                pending = None
        call = used_once(call.args[0])
    return call if pending is None else None


def _keeps_order(axes: Sequence[int], extents: Sequence) -> bool:
    """Tell whether a permutation moves only axes of extent 1."""
    kept = [axis for axis in axes if not is_one(extents[axis])]
    return kept == sorted(kept)


def with_extents(
    expr: relax.Expr, wanted: Sequence, values: Mapping[relax.Var, relax.Expr]
) -> relax.Expr:
    """Return a tensor in a shape: a variable before some reshapes, or a reshape.

    A permutation of the wanted axes and one of extent 1 becomes a permutation of the wanted axes.
    """
    extents = extents_of(expr)
    if extents is not None and are_equal_shapes(extents, wanted):
        return expr
    call = values.get(expr) if isinstance(expr, relax.Var) else None
    if isinstance(call, relax.Call) and call.op == _PERMUTE and extents is not None:
        axes, before = _axes(call), extents_of(call.args[0])
        for dropped, extent in enumerate(extents):
            rest = [*extents[:dropped], *extents[dropped + 1 :]]
            if before is not None and is_one(extent) and are_equal_shapes(rest, wanted):
                gone = axes[dropped]
                kept = [axis - (axis > gone) for axis in axes if axis != gone]
                shape = [*before[:gone], *before[gone + 1 :]]
                return op.permute_dims(with_extents(call.args[0], shape, values), kept)
        if before is not None and _keeps_order(axes, before):
            return with_extents(call.args[0], wanted, values)
    elif is_move(call):
        return with_extents(call.args[0], wanted, values)
    return op.reshape(expr, list(wanted))


def _axes(call: relax.Call) -> list[int]:
    rank = call.args[0].ty.ndim
    axes = call.attrs.axes
    return list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]
