"""The dtypes of accumulators."""

from __future__ import annotations

#: The dtypes that are too narrow to accumulate in.
HALVES = ("float16", "bfloat16")


def accumulation_dtype(*dtypes: str) -> str:
    """Return the dtype of the accumulator for products of these dtypes: at least float32."""
    wide = {"float32" if str(dtype) in HALVES else str(dtype) for dtype in dtypes}
    return "float64" if "float64" in wide else wide.pop() if len(wide) == 1 else "float32"
