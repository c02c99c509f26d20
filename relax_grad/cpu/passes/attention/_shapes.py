"""The shapes of an attention that is written out, and the numbers of constants."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import relax, tirx

from ....ir.compat import constant_value, dtype_of
from ....ir.expressions import are_equal
from ....ir.shapes import known_extents

#: The most positions of heads whose attention may stay written out, and the positions for each
#: feature.
_SHORT, _PER_FEATURE = 32, 2 / 3

#: The keys up to which the operator saves the weights for its gradient, the features beyond which
#: it takes longer to compute them again than to load them, and the most scores in all of which this
#: was measured: they fit in the caches.
_FEW_KEYS, _MANY_FEATURES, _CACHED = 256, 64, 2**21


def number_of(expr: relax.Expr) -> float | None:
    """Return the number of a constant of one element, or None."""
    value = constant_value(expr)
    return float(value.reshape(())) if value is not None and value.size == 1 else None


def extents_of(expr: relax.Expr) -> list | None:
    """Return the extents of a tensor of known shape, or None."""
    return known_extents(expr.ty)


def batch_of(expr: relax.Expr) -> list | None:
    """Return the extents of a tensor of known shape without the last two, or None."""
    extents = extents_of(expr)
    return None if extents is None else extents[:-2]


def is_one(extent: tirx.PrimExpr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def are_equal_shapes(extents: Sequence | None, others: Sequence | None) -> bool:
    """Tell whether shapes are known and equal for all values of their variables."""
    if extents is None or others is None or len(extents) != len(others):
        return False
    return all(map(are_equal, extents, others))


def fit(
    query: relax.Expr,
    turned: relax.Expr,
    weights: relax.Expr,
    value: relax.Expr,
    product: relax.Expr,
) -> bool:
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
    values, of these shapes, instead of tensors."""
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


def are_faster_as_products(
    query: relax.Expr, turned: relax.Expr, is_permuted: bool, has_masks: bool
) -> bool:
    """Tell whether the products of an attention take less time than the operator, given queries and
    keys with the features before the positions.

    Masks take more time than the products save. Two classes of others were measured, in one thread
    with vectors of 8 and of 16 elements (``benchmarks/written_out.py``). Heads of many
    features and few positions have a small share of their time in the softmax, while the operator
    saves permutations of its operands. Many keys of many features take longer to be multiplied
    again for the gradient than few scores to be loaded.

    Many keys of at most 64 features stay the operator, in at most the time of the products with
    vectors of 16 elements. With vectors of 8, operator and gradient take up to 1.09 of it: seven
    products in place of six, and two passes of exponentials in place of one, which take 1.04 of it
    at the peak of multiply-adds.
    """
    first, last = extents_of(query), extents_of(turned)
    if has_masks or first is None or last is None:
        return False
    if not all(isinstance(extent, tirx.IntImm) for extent in (*first, last[-1])):
        return False
    *batch, queries, features = map(int, first)
    keys = int(last[-1])
    most = max(queries, keys)
    if not is_permuted and most <= min(_SHORT, features * _PER_FEATURE):
        return True
    scores = math.prod(batch) * queries * keys
    return keys > _FEW_KEYS and features > _MANY_FEATURES and scores <= _CACHED
