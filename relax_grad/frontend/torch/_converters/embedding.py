"""Converters of embeddings: rows of a table, and the sums, means and maxima of bags of rows."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax, tirx

from ....op import stop_gradient
from ._call import Call, converts, dtype, extents_of, scalar
from ._support import Converter, Refused
from .indexing import front, require_places, rows_at, written

EMBEDDING: dict[str, Converter] = {}

_op = relax.op


@converts(EMBEDDING, "embedding.default")
def _embedding(
    call: Call,
    weight: relax.Expr,
    indices: relax.Expr,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> relax.Expr:
    """The row of the padding has no gradient."""
    if scale_grad_by_freq:
        raise Refused("scale_grad_by_freq changes the gradient only, which Relax cannot express")
    require_places(call, indices, extents_of(weight)[0])
    rows = call.emit(rows_at(call, weight, indices, 0))
    if padding_idx < 0:
        return rows
    shape = [*extents_of(indices), *[1] * (weight.ty.ndim - 1)]
    padding = call.emit(_op.equal(indices, scalar(padding_idx, dtype(indices))))
    return _op.where(call.reshape(padding, shape), stop_gradient(rows), rows)


@converts(EMBEDDING, "embedding_renorm.default", "embedding_renorm_.default")
def _embedding_renorm(call: Call, **_: object) -> None:
    raise Refused(
        "max_norm rescales the weight in the forward pass; rescale it in the training loop"
    )


@converts(EMBEDDING, "_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag(
    call: Call,
    weight: relax.Expr | None,
    indices: relax.Expr,
    offsets: relax.Expr,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: relax.Expr | None,
    include_last_offset: bool,
    padding_idx: int,
) -> tuple:
    """A bag is a sum, a mean or a maximum of rows; an empty one is zero."""
    if any(call.uses(i) for i in (1, 2, 3)):
        raise Refused("results other than the first are used")
    if scale_grad_by_freq:
        raise Refused("scale_grad_by_freq changes the gradient only, which Relax cannot express")
    kind, number = dtype(weight), extents_of(indices)[0]
    bags = call.shape[0]
    offsets = call.cast(offsets, "int64")
    offsets = front(call, offsets, 0, bags)
    places = call.emit(_op.expand_dims(_op.arange(0, number, 1, "int64"), 1))
    begun = call.cast(
        call.emit(_op.less_equal(call.emit(_op.expand_dims(offsets, 0)), places)), "int64"
    )
    bag = call.emit(_op.subtract(_op.sum(begun, [1]), scalar(1, "int64")))
    if padding_idx >= 0:
        padding = call.emit(_op.equal(indices, scalar(padding_idx, dtype(indices))))
        bag = call.emit(_op.where(padding, scalar(bags, "int64"), bag))
    require_places(call, indices, extents_of(weight)[0])
    # Rows of the padding fall into one more bag, which is cut off.
    rows = call.emit(rows_at(call, weight, indices, 0))
    if per_sample_weights is not None:
        rows = call.emit(_op.multiply(rows, _op.expand_dims(per_sample_weights, 1)))
    width = extents_of(weight)[1]
    shape = [bags + 1, width]
    if mode == 2:
        lowest = call.filled(shape, -math.inf, kind)
        index = call.emit(_op.broadcast_to(_op.expand_dims(bag, 1), [number, width]))
        result = _first_maximum(call, lowest, index, rows)
    else:
        result = written(call, call.emit(_op.zeros(shape, kind)), bag, rows, True)
    if mode == 1:
        ones = call.emit(_op.ones([number], kind))
        count = written(call, call.emit(_op.zeros([bags + 1], kind)), bag, ones, True)
        count = call.emit(_op.maximum(count, scalar(1, kind)))
        result = call.emit(_op.divide(result, _op.expand_dims(count, 1)))
    return front(call, result, 0, bags), None, None, None


def _first_maximum(
    call: Call, lowest: relax.Expr, index: relax.Expr, rows: int | tirx.Expr
) -> relax.Expr:
    """Return each bag's maximum, with the gradient at its first row; empty bags are zero."""
    kind, number = dtype(rows), extents_of(rows)[0]
    fixed = call.emit(stop_gradient(rows))
    best = call.emit(_op.scatter_elements(lowest, index, fixed, 0, "max"))
    hit = call.emit(_op.equal(fixed, call.emit(_op.gather_elements(best, index, 0))))
    places = call.emit(
        _op.broadcast_to(_op.expand_dims(_op.arange(0, number, 1, "int64"), 1), extents_of(rows))
    )
    last = np.iinfo("int64").max
    late = scalar(last, "int64")
    places = call.emit(_op.where(hit, places, late))
    none = call.filled(extents_of(lowest), last, "int64")
    first = call.emit(_op.scatter_elements(none, index, places, 0, "min"))
    empty = call.emit(_op.equal(first, late))
    first = call.emit(_op.where(empty, scalar(0, "int64"), first))
    return call.emit(_op.where(empty, scalar(0, kind), _op.gather_elements(rows, first, 0)))
