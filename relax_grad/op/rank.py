"""Families of operators that exist once for each number of spatial axes."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

#: The numbers of spatial axes that TVM has convolution and pooling for.
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
    """Give a function that is made once for each of several operators a name and the words of its docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = function.__doc__.format(**words)
    return function
