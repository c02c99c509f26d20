"""Converters of products of matrices and of distances between rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax

from ....op import stop_gradient
from ._call import Call, converts, dtype, extents_of, scalar, static, wide_dtype
from ._support import Converter
from .reduction import norm

MATMUL: dict[str, Converter] = {}

_op = relax.op


@converts(MATMUL, "mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default")
def _mm(call: Call, data: relax.Expr, **other: relax.Expr) -> relax.Expr:
    (other,) = other.values()
    return _op.matmul(data, other)


@converts(MATMUL, "linear.default")
def _linear(
    call: Call, data: relax.Expr, weight: relax.Expr, bias: relax.Expr | None
) -> relax.Expr:
    transposed = call.emit(_op.permute_dims(weight))
    product = call.emit(_op.matmul(data, transposed))
    return product if bias is None else _op.add(product, bias)


def _scaled(call: Call, value: relax.Expr, factor: float) -> relax.Expr:
    if factor == 1:
        return value
    return call.emit(_op.multiply(value, call.tensor(factor, dtype(value))))


@converts(MATMUL, "addmm.default", "baddbmm.default", "addmv.default")
def _addmm(call: Call, data: relax.Expr, beta: float, alpha: float, **operands: Any) -> relax.Expr:
    """With beta 0 the addend contributes nothing, NaN included."""
    first, second = operands.values()
    product = _scaled(call, call.emit(_op.matmul(first, second)), alpha)
    if beta == 0:
        return product
    return _op.add(_scaled(call, data, beta), product)


@converts(MATMUL, "_trilinear.default")
def _trilinear(
    call: Call,
    i1: relax.Expr,
    i2: relax.Expr,
    i3: relax.Expr,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int,
) -> relax.Expr:
    """Three factors get new dimensions; their product is summed."""
    factors = [
        call.emit(_op.expand_dims(factor, axes)) if axes else factor
        for factor, axes in ((i1, expand1), (i2, expand2), (i3, expand3))
    ]
    product = call.emit(_op.multiply(_op.multiply(factors[0], factors[1]), factors[2]))
    return _op.sum(product, sumdim)


@converts(MATMUL, "_cdist_forward.default")
def _cdist(
    call: Call, x1: relax.Expr, x2: relax.Expr, p: float, compute_mode: int | None
) -> relax.Expr:
    rank = x1.ty.ndim
    rows = call.emit(_op.expand_dims(x1, rank - 1))
    columns = call.emit(_op.expand_dims(x2, rank - 2))
    return _distance(call, call.emit(_op.subtract(rows, columns)), float(p), -1)


@converts(MATMUL, "_pdist_forward.default")
def _pdist(call: Call, data: relax.Expr, p: float) -> relax.Expr:
    count = static(extents_of(data))[0]
    rows, columns = (
        call.emit(_op.take(data, relax.const(places.astype("int64")), 0))
        for places in np.triu_indices(count, 1)
    )
    return _distance(call, call.emit(_op.subtract(rows, columns)), float(p), 1)


def _distance(call: Call, difference: relax.Expr, order: float, axis: int) -> relax.Expr:
    """Return the norm of differences. Each of several equal extremes has the whole gradient, and
    not a share, as in PyTorch's distances."""
    if order == 0:
        return _differing(call, difference, axis)
    distance = call.emit(norm(call, difference, order, [axis], False))
    if order != math.inf:
        return distance
    kind = dtype(distance)
    fixed = call.emit(stop_gradient(difference))
    extreme = call.emit(_op.expand_dims(call.emit(stop_gradient(distance)), axis))
    ties = call.emit(_op.equal(call.emit(_op.abs(fixed)), extreme))
    others = call.emit(_op.subtract(_op.sum(call.cast(ties, kind), [axis]), scalar(1, kind)))
    rest = call.emit(_op.subtract(distance, call.emit(stop_gradient(distance))))
    rest = call.emit(_op.where(_op.isinf(distance), scalar(0, kind), rest))
    return _op.add(distance, call.emit(_op.multiply(rest, others)))


def _differing(call: Call, difference: relax.Expr, axis: int) -> relax.Expr:
    """Return the number of differences other than 0; PyTorch's distances keep NaN, its norms do
    not."""
    kind = dtype(difference)
    wide = call.cast(call.emit(stop_gradient(difference)), wide_dtype(kind))
    ones = call.cast(call.emit(_op.not_equal(wide, scalar(0, wide_dtype(kind)))), kind)
    each = _op.where(call.emit(_op.isnan(wide)), scalar(math.nan, kind), ones)
    return _op.sum(call.emit(each), [axis])


@converts(MATMUL, "_grouped_mm.default")
def _grouped_mm(
    call: Call,
    data: relax.Expr,
    mat2: relax.Expr,
    offs: relax.Expr,
    bias: relax.Expr | None,
    out_dtype: Any,
) -> relax.Expr:
    """Each group multiplies its own rows or columns; the others are zero."""
    left, right = data.ty.ndim, mat2.ty.ndim
    kind = call.dtype
    if offs is None:
        result = call.emit(_op.matmul(data, mat2))
        return call.cast(result if bias is None else call.emit(_op.add(result, bias)), kind)
    groups = extents_of(offs)[0]
    if left == 2 and right == 2:
        extent = extents_of(data)[1]
    else:
        extent = extents_of(data)[0] if left == 2 else extents_of(mat2)[1]
    ends = call.reshape(call.cast(offs, "int64"), [groups, 1])
    zero = _op.zeros([1, 1], "int64")
    starts = ends
    if groups == 1:
        starts = call.emit(zero)
    else:
        begin = call.emit(_op.strided_slice(ends, [0], [0], [groups - 1], [1]))
        starts = call.emit(_op.concat([call.emit(zero), begin], 0))
    places = call.emit(_op.expand_dims(_op.arange(0, extent, 1, "int64"), 0))
    member = call.emit(_op.logical_and(_op.greater_equal(places, starts), _op.less(places, ends)))

    def of_group(value: relax.Expr, axis: int) -> relax.Expr:
        """Return a matrix once for each group, with zeros in the rows or columns of the others."""
        shape = [groups, 1, 1]
        shape[1 + axis] = extent
        mask = call.reshape(member, shape)
        return call.emit(_op.where(mask, _op.expand_dims(value, 0), scalar(0, dtype(value))))

    if left == 2 and right == 2:
        result = call.emit(_op.matmul(of_group(data, 1), mat2))
    elif left == 2:
        product = call.emit(_op.matmul(of_group(data, 0), mat2))
        product = call.cast(product, wide_dtype(dtype(product)))
        result = call.emit(_op.sum(product, [0]))
    else:
        product = call.emit(_op.matmul(data, of_group(mat2, 1)))
        product = call.cast(product, wide_dtype(dtype(product)))
        result = call.emit(_op.sum(product, [0]))
    result = call.cast(result, kind)
    return result if bias is None else _op.add(result, call.cast(bias, kind))
