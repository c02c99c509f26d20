"""The extents of tensors of known shape."""

from __future__ import annotations

from tvm import relax, tirx


def known_extents(kind: relax.Type) -> list[tirx.PrimExpr] | None:
    """Return the extents of tensors of a type; None if the shape is unknown or the type is another
    one."""
    if type(kind) is not relax.TensorType:
        return None
    shape = kind.shape
    return shape.values[:] if type(shape) is relax.ShapeExpr else None


def static_extents(kind: relax.Type) -> list[int] | None:
    """Return the extents of tensors of a type as numbers; None if an extent is unknown or
    symbolic."""
    extents = known_extents(kind)
    if extents is None or not all(type(extent) is tirx.IntImm for extent in extents):
        return None
    return [extent.value for extent in extents]
