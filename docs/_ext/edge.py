"""An edge of an operator: a call in each library, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Edge:
    """A call at an edge. What is differentiated is the sum of its results.

    Attributes
    ----------
    section : str
        The part of the page that it is in.
    call : str
        The call as the page shows it.
    inputs : Sequence[np.ndarray]
        What it is called with; floating-point arrays get a gradient.
    relax, torch, jax : Callable or None
        The call in each library. ``torch`` and ``jax`` take the module as well, before the inputs; None
        where the library has no such function.
    """

    section: str
    call: str
    inputs: Sequence[np.ndarray]
    relax: Callable
    torch: Callable | None
    jax: Callable | None


def written(value) -> str:
    """Write an array as the page shows it: at most four digits, and no zeros that say nothing."""
    if isinstance(value, np.ndarray) and value.ndim:
        while value.ndim > 1 and len(value) == 1:
            value = value[0]
        return "[" + ", ".join(map(written, value)) + "]"
    return format(float(value) + 0.0, ".4g")
