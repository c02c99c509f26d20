"""The difference between arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """The largest difference of two arrays.

    Attributes
    ----------
    error : float
        The error, relative to the larger of 1 and the largest finite magnitude in the reference.
        NaN if exactly one of the two elements is NaN.
    at : str
        The indices of the element.
    actual, wanted : float
        The element in the array and in the reference.
    """

    error: float
    at: str = ""
    actual: float = 0.0
    wanted: float = 0.0


def difference(actual: np.ndarray, wanted: np.ndarray) -> Difference:
    """Compare two arrays of the same shape; infinities of the same sign are equal, and NaN equals
    NaN."""
    if not wanted.size:
        return Difference(0.0)
    actual, wanted = np.asarray(actual, "float64"), np.asarray(wanted, "float64")
    same = (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(actual - wanted))
    scale = max(1.0, np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    at = ", ".join(str(int(i)) for i in worst)
    return Difference(float(error[worst] / scale), at, float(actual[worst]), float(wanted[worst]))
