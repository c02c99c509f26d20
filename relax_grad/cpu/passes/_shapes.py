"""The shapes of an attention that is written out, and the numbers of constants."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx

from ...ir.compat import constant_value, dtype_of
from ...ir.expressions import are_equal

#: The most positions of heads whose attention may stay written out.
_SHORT = 32


def number_of(expr: relax.Expr) -> float | None:
    """Return the number of a constant of one element, or None."""
    value = constant_value(expr)
    return float(value.reshape(())) if value is not None and value.size == 1 else None


def extents_of(expr: relax.Expr) -> list | None:
    """Return the extents of a tensor of known shape, or None."""
    shape = expr.ty.shape if isinstance(expr.ty, relax.TensorType) else None
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None


def batch_of(expr: relax.Expr) -> list | None:
    """Return the extents of a tensor of known shape without the last two, or None."""
    extents = extents_of(expr)
    return None if extents is None else extents[:-2]


def is_one(extent) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def are_equal_shapes(extents: Sequence | None, others: Sequence | None) -> bool:
    """Tell whether shapes are known and equal for all values of their variables."""
    if extents is None or others is None or len(extents) != len(others):
        return False
    return all(map(are_equal, extents, others))


def fit(query, turned, weights, value, product) -> bool:
    """Tell whether the operator supports queries, keys with the features before the positions, and
    values."""
    tensors = query, turned, weights, value, product
    shapes = [extents for tensor in tensors if (extents := extents_of(tensor)) is not None]
    if len(shapes) < len(tensors):
        return False
    rank = len(shapes[0])
    if any(len(shape) != rank for shape in shapes):
        return False
    first, keys, _, values, _ = shapes
    return are_supported((first, keys, values), tensors)


def are_supported(shapes: Sequence, tensors: Sequence[relax.Expr]) -> bool:
    """Tell whether the operator supports queries, keys with the features before the positions, and
    values, of these shapes, in the place of tensors."""
    if any(dtype_of(tensor.ty) != "float32" for tensor in tensors):
        return False
    first, keys, values = shapes
    static = [*first[1:-2], first[-1], values[-1]]
    if not all(isinstance(extent, tirx.IntImm) and int(extent) > 0 for extent in static):
        return False
    pairs = [(first[-1], keys[-2]), (keys[-1], values[-2])]
    batches = [shape[:-2] for shape in (keys, values)]
    return all(are_equal(*pair) for pair in pairs) and all(
        are_equal_shapes(first[:-2], batch) for batch in batches
    )


def have_few_positions(query: relax.Expr, turned: relax.Expr) -> bool:
    """Tell whether products of queries and keys, with the features before the positions, take less
    time than the operator.

    Heads of many features and few positions have a small share of their time in the softmax.
    """
    sizes = [*(extents_of(query) or [None])[-2:], *(extents_of(turned) or [None])[-1:]]
    if len(sizes) != 3 or not all(isinstance(extent, tirx.IntImm) for extent in sizes):
        return False
    queries, features, keys = map(int, sizes)
    return max(queries, keys) <= min(_SHORT, features // 4)
