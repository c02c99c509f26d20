"""The extents of tensors of known shape."""

from __future__ import annotations

from tvm import relax, tirx


def known_extents(kind: relax.Type) -> list[tirx.PrimExpr] | None:
    """Return the extents of tensors of a type; None if the shape is unknown or the type is another
    one."""
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return None
    return list(kind.shape.values)


def static_extents(kind: relax.Type) -> list[int] | None:
    """Return the extents of tensors of a type as numbers; None if an extent is unknown or
    symbolic."""
    extents = known_extents(kind)
    if extents is None or not all(isinstance(extent, tirx.IntImm) for extent in extents):
        return None
    return [int(extent) for extent in extents]
