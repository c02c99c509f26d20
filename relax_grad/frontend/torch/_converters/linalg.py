"""Converters of linear algebra on small matrices: elimination, the exponential, and products of reflections."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import relax

from ....op import stop_gradient
from ._call import Call, converts, dtype, extents_of, scalar, static
from ._support import Refused
from .manipulate import sliced

LINALG: dict[str, Callable] = {}

_op = relax.op

#: The largest matrix that is eliminated, with a few operators for each row.
_MOST_ROWS = 64

#: The terms of the exponential's series, which suffice for matrices of norm 1, and the number of squarings.
_TERMS, _SQUARINGS = 18, 12


def _rows_of(data) -> int:
    (rows,) = static([extents_of(data)[-2]], "the number of rows")
    return rows


def _identity(rows: int, columns: int, kind: str) -> relax.Expr:
    return relax.const(np.eye(rows, columns), kind)


def _transposed(call: Call, data) -> relax.Expr:
    rank = data.ty.ndim
    return call.emit(_op.permute_dims(data, [*range(rank - 2), rank - 1, rank - 2]))


def _eliminated(call: Call, data, right) -> tuple:
    """Return the solution of ``data @ x = right``, the sign of the determinant and the pivots, by Gauss and Jordan.

    In each step, the row with the largest element of the column is the pivot.
    """
    rows, kind, rank = _rows_of(data), dtype(data), data.ty.ndim
    if rows > _MOST_ROWS:
        raise Refused(f"matrices of more than {_MOST_ROWS} rows are not solved")
    if rank != right.ty.ndim:
        right = call.emit(
            _op.broadcast_to(right, [*extents_of(data)[:-2], *extents_of(right)[-2:]])
        )
    both = call.emit(_op.concat([data, right], rank - 1))
    shape, axis = extents_of(both), rank - 2
    places = relax.const(np.arange(rows).reshape(rows, 1), "int64")
    sign, pivots = scalar(1, kind), []
    for k in range(rows):
        column = sliced(call, both, rank - 1, k, 1)
        size = call.emit(_op.abs(call.emit(stop_gradient(column))))
        below = relax.const((np.arange(rows) >= k).reshape(rows, 1))
        size = call.emit(_op.where(below, size, scalar(-1, kind)))
        best = call.emit(_op.argmax(size, axis, True))
        here = call.emit(_op.equal(places, scalar(k, "int64")))
        there = call.emit(_op.equal(places, best))
        order = call.emit(_op.where(there, scalar(k, "int64"), places))
        order = call.emit(_op.where(here, best, order))
        order = call.emit(_op.broadcast_to(order, shape))
        both = call.emit(_op.gather_elements(both, order, axis))
        stays = call.emit(_op.equal(best, scalar(k, "int64")))
        factor = call.emit(_op.where(stays, scalar(1, kind), scalar(-1, kind)))
        sign = call.emit(_op.multiply(sign, factor))
        row, column = sliced(call, both, axis, k, 1), sliced(call, both, rank - 1, k, 1)
        pivot = sliced(call, row, rank - 1, k, 1)
        pivots.append(pivot)
        row = call.emit(_op.divide(row, pivot))
        rest = call.emit(_op.subtract(both, call.emit(_op.multiply(column, row))))
        both = call.emit(_op.where(here, row, rest))
    return sliced(call, both, rank - 1, rows, shape[-1] - rows), sign, pivots


def _information(call: Call, data) -> relax.Expr:
    """Return PyTorch's number of a fault, which is taken as none: a singular matrix has infinite results."""
    return call.emit(_op.zeros(extents_of(data)[:-2], "int32"))


@converts(LINALG, "_linalg_solve_ex.default")
def _solve(call, A, B, left, check_errors):
    is_vector = B.ty.ndim == 1 or B.ty.ndim == A.ty.ndim - 1
    if is_vector:
        B = call.emit(_op.expand_dims(B, B.ty.ndim))
    elif not left:
        A, B = _transposed(call, A), _transposed(call, B)
    found = _eliminated(call, A, B)[0]
    if not left and not is_vector:
        found = _transposed(call, found)
    return call.reshape(found, call.shape), None, None, _information(call, A)


@converts(LINALG, "linalg_inv_ex.default")
def _inverse(call, A, check_errors):
    rows = _rows_of(A)
    one = call.emit(_op.broadcast_to(_identity(rows, rows, dtype(A)), extents_of(A)))
    return _eliminated(call, A, one)[0], _information(call, A)


def _pivots(call: Call, data) -> tuple:
    """Return the sign that the exchanges of rows give the determinant, and the pivots."""
    none = call.emit(_op.zeros([*extents_of(data)[:-1], 1], dtype(data)))
    _, sign, pivots = _eliminated(call, data, none)
    pivots = call.emit(_op.concat(pivots, data.ty.ndim - 2))
    return sign, pivots


@converts(LINALG, "_linalg_det.default")
def _determinant(call, A):
    sign, pivots = _pivots(call, A)
    product = call.emit(_op.prod(pivots, [-2, -1]))
    return _op.multiply(call.reshape(sign, call.shape), product), None, None


@converts(LINALG, "_linalg_slogdet.default")
def _log_determinant(call, A):
    sign, pivots = _pivots(call, A)
    fixed = call.emit(stop_gradient(pivots))
    signs = call.emit(_op.prod(call.emit(_op.sign(fixed)), [-2, -1]))
    sign = call.emit(_op.multiply(call.reshape(sign, call.shape), signs))
    sizes = call.emit(_op.log(call.emit(_op.abs(pivots))))
    return sign, call.emit(_op.sum(sizes, [-2, -1])), None, None


@converts(LINALG, "linalg_matrix_exp.default")
def _exponential(call, data):
    """The series of a matrix whose norm halvings have brought below 1, squared as often.

    The result is NaN for norms above 4096.
    """
    kind, rows = dtype(data), _rows_of(data)
    data = call.cast(data, "float64")
    one = _identity(rows, rows, "float64")
    size = call.emit(_op.abs(call.emit(stop_gradient(data))))
    size = call.emit(_op.max(call.emit(_op.sum(size, [-2], True)), [-1], True))
    floor = call.emit(_op.maximum(size, scalar(1, "float64")))
    halvings = call.emit(_op.ceil(_op.multiply(_op.log(floor), scalar(1 / math.log(2), "float64"))))
    small = call.emit(_op.exp(_op.multiply(halvings, scalar(-math.log(2), "float64"))))
    allowed = call.emit(_op.less_equal(halvings, scalar(_SQUARINGS, "float64")))
    small = call.emit(_op.where(allowed, small, scalar(math.nan, "float64")))
    data = call.emit(_op.multiply(data, small))
    found = one
    for k in range(_TERMS, 0, -1):
        term = call.emit(_op.matmul(data, found)) if k < _TERMS else data
        found = call.emit(_op.add(one, _op.multiply(term, scalar(1 / k, "float64"))))
    for k in range(_SQUARINGS):
        more = call.emit(_op.greater(halvings, scalar(k, "float64")))
        found = call.emit(_op.where(more, call.emit(_op.matmul(found, found)), found))
    return call.cast(found, kind)


@converts(LINALG, "linalg_householder_product.default")
def _reflections(call, data, tau):
    """The columns below the diagonal are the vectors of the reflections, whose own elements are 1."""
    kind, rank = dtype(data), data.ty.ndim
    rows, columns = static(extents_of(data)[-2:], "the size of the matrix")
    (count,) = static(extents_of(tau)[-1:], "the number of reflections")
    found = call.emit(_op.broadcast_to(_identity(rows, columns, kind), extents_of(data)))
    for k in reversed(range(count)):
        places = np.arange(rows).reshape(rows, 1)
        own = _op.where(relax.const(places == k), scalar(1, kind), scalar(0, kind))
        vector = sliced(call, data, rank - 1, k, 1)
        vector = call.emit(_op.where(relax.const(places > k), vector, call.emit(own)))
        factor = call.emit(_op.expand_dims(sliced(call, tau, rank - 2, k, 1), -1))
        product = call.emit(_op.matmul(_transposed(call, vector), found))
        change = call.emit(_op.matmul(vector, product))
        found = call.emit(_op.subtract(found, _op.multiply(factor, change)))
    return found
