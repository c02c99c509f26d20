"""What operators share that TVM has once for each number of spatial axes: their rank is data here."""

from __future__ import annotations

import re
from collections.abc import Callable

from tvm import relax

#: The numbers of spatial axes that TVM has convolution and pooling for.
RANKS = (1, 2, 3)


def spatial_axes(rank: int) -> str:
    """Return the names of the spatial axes in the order of the attributes: ``"HW"`` for rank 2."""
    return "DHW"[-rank:]


def rank_of(call: relax.Call) -> int:
    """Return the number of spatial axes of a call, which its operator's name ends in or holds."""
    return int(re.search(r"([123])d(_|$)", call.op.name)[1])


def named(function: Callable, name: str, **words: str) -> Callable:
    """Give a function that is made once for each of several operators a name and the words of its docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = function.__doc__.format(**words)
    return function
