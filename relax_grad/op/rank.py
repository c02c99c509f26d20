"""Operator families with one member for each number of spatial axes."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

#: The numbers of spatial axes for which TVM has convolution and pooling.
RANKS = (1, 2, 3)

#: The operators of each family.
_FAMILIES = (
    *("relax.nn.conv{}d", "relax.nn.conv{}d_transpose"),
    *("relax.grad.conv{}d_backward_data", "relax.grad.conv{}d_backward_weight"),
    *("relax.nn.max_pool{}d", "relax.grad.max_pool{}d_backward", "relax.grad.max_pool{}d_jvp"),
    *("relax.nn.avg_pool{}d", "relax.grad.avg_pool{}d_backward"),
    *("relax.nn.adaptive_avg_pool{}d", "relax.grad.adaptive_avg_pool{}d_backward"),
)

_RANKS = {family.format(rank): rank for family in _FAMILIES for rank in RANKS}


def spatial_axes(rank: int) -> str:
    """Return the names of the spatial axes in the order of the attributes: ``"HW"`` for rank 2."""
    return "DHW"[-rank:]


def rank_of(call: relax.Call) -> int:
    """Return the number of spatial axes of a call of an operator of these families."""
    return _RANKS[call.op.name]


def named(function: Callable, name: str, **words: str) -> Callable:
    """Set the name of a generated function and fill in the fields of its docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = (function.__doc__ or "").format(**words)
    return function
