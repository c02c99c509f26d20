"""The sums of the processor's tiles of bfloat16 (AMX) in NumPy."""

from __future__ import annotations

import numpy as np


def in_order(a: np.ndarray, bb: np.ndarray, c: np.ndarray, steps: int) -> np.ndarray:
    """Return the sums in the order of ``tdpbf16ps``: for 16 pairs, the even and the odd elements
    with fused multiply-adds, then both, then C."""
    a, bb, total = a.astype("float64"), bb.astype("float64"), c[:, : bb.shape[1]].copy()
    for step in range(steps):
        parts = [np.zeros(total.shape, "float32") for _ in range(2)]
        for k in range(32):
            # Products of bfloat16 are exact in float64, and so are nearly all sums with a float32.
            exact = np.outer(a[:, 32 * step + k], bb[32 * step + k]) + parts[k % 2]
            parts[k % 2] = exact.astype("float32")
        total = total + (parts[0] + parts[1])
    return total
