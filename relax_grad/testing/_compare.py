"""How much arrays differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Where two arrays differ most.

    Attributes
    ----------
    error : float
        By how much, relative to the largest finite number that is wanted, or to 1 if that is larger; NaN where only one
        is NaN.
    at : str
        The indices of the element.
    found, wanted : float
        The element in both.
    """

    error: float
    at: str = ""
    found: float = 0.0
    wanted: float = 0.0


def difference(found: np.ndarray, wanted: np.ndarray) -> Difference:
    """Compare two arrays of one shape, in which infinities of one sign are the same, and NaN is the same as NaN."""
    if not wanted.size:
        return Difference(0.0)
    found, wanted = np.asarray(found, "float64"), np.asarray(wanted, "float64")
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(found - wanted))
    scale = max(1.0, np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    at = ", ".join(str(int(i)) for i in worst)
    return Difference(float(error[worst] / scale), at, float(found[worst]), float(wanted[worst]))
