"""What the legalizations share."""

from __future__ import annotations

from tvm import relax, tirx


def shape_values(shape: relax.Expr) -> list[tirx.PrimExpr]:
    """Return the dimensions of a shape argument, whether it is written out or a variable."""
    return list(shape.ty.values)


def int_list(values) -> list[int]:
    """Return an attribute that is an array of integers as a list of Python's."""
    return [int(value) for value in values]
