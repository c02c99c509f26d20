"""The dtypes that are accumulated in."""

from __future__ import annotations

#: The dtypes that are too narrow to accumulate in.
HALVES = ("float16", "bfloat16")


def accumulation_dtype(*dtypes: str) -> str:
    """Return the dtype to accumulate products of these dtypes in: at least float32."""
    wide = {"float32" if str(dtype) in HALVES else str(dtype) for dtype in dtypes}
    return "float64" if "float64" in wide else wide.pop() if len(wide) == 1 else "float32"
