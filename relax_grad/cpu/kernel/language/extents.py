"""The extents of generated kernels: integers, or expressions of int32."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, reduce
from math import prod
from typing import TypeAlias

from tvm import tirx
from tvm.tirx import IntImm

Extent: TypeAlias = "int | tirx.PrimExpr"

#: The float32 elements of a cache line.
LINE = 16


def count(shape: Iterable[Extent]) -> Extent:
    """Return the number of elements of a shape."""
    return prod(shape)


def ceil_div(a: Extent, b: int) -> Extent:
    """Return a / b rounded up."""
    return (a + (b - 1)) // b


def quotient(a: Extent, b: Extent) -> Extent:
    """Return a / b rounded down, of numbers that are not negative.

    TVM tries to prove the signs of a symbolic floor division, which takes seconds.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return tirx.truncdiv(as_expr(a), as_expr(b))


@lru_cache(maxsize=4096)
def const(value: int) -> IntImm:
    return IntImm(
        "int32", value
    )  # cached: kernels hold tens of thousands of constants, most of them in shuffles


def as_expr(extent: Extent) -> tirx.PrimExpr:
    """Return an extent as an expression."""
    return const(extent) if isinstance(extent, int) else extent


def as_float(extent: Extent) -> tirx.PrimExpr:
    """Return an extent as a float32."""
    if isinstance(extent, int):
        return tirx.const(float(extent), "float32")
    return tirx.Cast("float32", extent)


def sum_of(terms: Iterable) -> tirx.PrimExpr:
    """Return the sum of expressions, added in their order."""
    return reduce(lambda a, b: a + b, terms)
