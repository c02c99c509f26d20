"""An edge case of an operator: a call in each library, and the format of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Edge:
    """A call at an edge. The sum of its results is differentiated.

    Attributes
    ----------
    section : str
        The section of the page.
    call : str
        The text of the call on the page.
    inputs : Sequence[np.ndarray]
        The arguments; floating-point arrays get a gradient.
    relax, torch, jax : Callable or None
        The call in each library. ``torch`` and ``jax`` also take the module, before the inputs.
        They are None if the library has no such function.
    """

    section: str
    call: str
    inputs: Sequence[np.ndarray]
    relax: Callable
    torch: Callable | None
    jax: Callable | None


def written(value) -> str:
    """Return the text of an array for the page, with at most four digits and no trailing zeros."""
    if isinstance(value, np.ndarray) and value.ndim:
        while value.ndim > 1 and len(value) == 1:
            value = value[0]
        return "[" + ", ".join(map(written, value)) + "]"
    return format(float(value) + 0.0, ".4g")
