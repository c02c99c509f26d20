"""Converters of linear algebra on small matrices: elimination, the exponential, and products of
reflections."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from ....op import stop_gradient
from ._call import Call, converts, dtype, extents_of, scalar, static
from ._support import Converter, Refused
from .manipulate import sliced

LINALG: dict[str, Converter] = {}

_op = relax.op

#: The largest matrix that is eliminated, with a few operators for each row.
_MOST_ROWS = 64

#: The terms of the exponential's series, which suffice for matrices of norm 1, and the number of
#: squarings.
_TERMS, _SQUARINGS = 18, 12


def _rows_of(data: relax.Expr) -> int:
    (rows,) = static([extents_of(data)[-2]], "the number of rows")
    return rows


def _few_rows(data: relax.Expr) -> int:
    rows = _rows_of(data)
    if rows > _MOST_ROWS:
        raise Refused(f"matrices of more than {_MOST_ROWS} rows are not factorised or solved")
    return rows


def _identity(rows: int, columns: int, kind: str) -> relax.Expr:
    return relax.const(np.eye(rows, columns), kind)


def _transposed(call: Call, data: relax.Expr) -> relax.Expr:
    rank = data.ty.ndim
    return call.emit(_op.permute_dims(data, [*range(rank - 2), rank - 1, rank - 2]))


def _eliminated(call: Call, data: relax.Expr, right: relax.Expr) -> tuple:
    """Return the solution of ``data @ x = right``, the sign of the determinant and the pivots, by
    Gauss and Jordan.

    In each step, the row with the largest element of the column is the pivot.
    """
    rows, kind, rank = _few_rows(data), dtype(data), data.ty.ndim
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


def _information(call: Call, data: relax.Expr) -> relax.Expr:
    """Return PyTorch's number of a fault, which is taken as none: a singular matrix has infinite
    results."""
    return call.emit(_op.zeros(extents_of(data)[:-2], "int32"))


@converts(LINALG, "_linalg_solve_ex.default")
def _solve(call: Call, A: relax.Expr, B: relax.Expr, left: bool, check_errors: bool) -> tuple:
    is_vector = B.ty.ndim == 1 or B.ty.ndim == A.ty.ndim - 1
    if is_vector:
        B = call.emit(_op.expand_dims(B, B.ty.ndim))
    elif not left:
        A, B = _transposed(call, A), _transposed(call, B)
    solution = _eliminated(call, A, B)[0]
    if not left and not is_vector:
        solution = _transposed(call, solution)
    return call.reshape(solution, call.shape), None, None, _information(call, A)


@converts(LINALG, "linalg_inv_ex.default")
def _inverse(call: Call, A: relax.Expr, check_errors: bool) -> tuple:
    rows = _rows_of(A)
    identity = call.emit(_op.broadcast_to(_identity(rows, rows, dtype(A)), extents_of(A)))
    return _eliminated(call, A, identity)[0], _information(call, A)


@converts(LINALG, "linalg_cholesky_ex.default")
def _cholesky(
    call: Call, data: relax.Expr, upper: bool = False, check_errors: bool = False
) -> tuple:
    """As in PyTorch, one triangle is read, and the gradient is symmetric."""
    kind = dtype(data)
    if upper:
        data = _transposed(call, data)
    half = call.emit(_op.multiply(data, scalar(0.5, kind)))
    mean = call.emit(_op.add(half, _transposed(call, half)))
    error = call.emit(stop_gradient(call.emit(_op.subtract(data, mean))))
    factor = _factor(call, call.emit(_op.add(mean, error)))
    return _transposed(call, factor) if upper else factor, _information(call, data)


def _factor(call: Call, rest: relax.Expr) -> relax.Expr:
    """Return the lower factor; subtract one column's products after the other from the rest of the
    matrix."""
    rows, kind, rank = _few_rows(rest), dtype(rest), rest.ty.ndim
    columns, places = [], np.arange(rows).reshape(rows, 1)
    for k in range(rows):
        column = sliced(call, rest, rank - 1, k, 1)
        pivot = call.emit(_op.sqrt(sliced(call, column, rank - 2, k, 1)))
        column = call.emit(_op.divide(column, pivot))
        column = call.emit(_op.where(relax.const(places >= k), column, scalar(0, kind)))
        columns.append(column)
        product = call.emit(_op.multiply(column, _transposed(call, column)))
        rest = call.emit(_op.subtract(rest, product))
    return call.emit(_op.concat(columns, rank - 1))


@converts(LINALG, "linalg_solve_triangular.default")
def _solve_triangular(
    call: Call,
    data: relax.Expr,
    B: relax.Expr,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> relax.Expr:
    return _substituted(call, data, B, upper, left, unitriangular=unitriangular)


@converts(LINALG, "cholesky_solve.default", "cholesky_inverse.default")
def _cholesky_solve(
    call: Call, data: relax.Expr, input2: relax.Expr | None = None, upper: bool = False
) -> relax.Expr:
    """Solve for the product of the factors.

    One triangle of the factor is read, but PyTorch's gradient is the gradient of the product of
    whole matrices.
    """
    if input2 is None:
        rows = _few_rows(data)
        input2, data = (
            data,
            call.emit(_op.broadcast_to(_identity(rows, rows, dtype(data)), extents_of(data))),
        )
    lower = _transposed(call, input2) if upper else input2
    whole = call.emit(_op.matmul(lower, _transposed(call, lower)))
    fixed = call.emit(stop_gradient(lower))
    read = call.emit(_op.tril(fixed))
    product = call.emit(_op.matmul(read, _transposed(call, read)))
    error = call.emit(stop_gradient(call.emit(_op.subtract(product, whole))))
    factor = _factor(call, call.emit(_op.add(whole, error)))
    solution = _substituted(call, factor, data, upper=False)
    return _substituted(call, _transposed(call, factor), solution, upper=True)


def _substituted(
    call: Call,
    data: relax.Expr,
    right: relax.Expr,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> relax.Expr:
    """Return the solution of ``data @ x = right`` for a triangular matrix, one row after the
    other."""
    if not left:
        data, right, upper = _transposed(call, data), _transposed(call, right), not upper
    rows, kind, rank = _few_rows(data), dtype(data), len(call.shape)
    shape = call.shape if left else [*call.shape[:-2], call.shape[-1], call.shape[-2]]
    solution = call.emit(_op.broadcast_to(right, shape))
    batch = call.shape[:-2]
    data = call.emit(_op.broadcast_to(data, [*batch, rows, rows]))
    places = np.arange(rows).reshape(rows, 1)
    for k in reversed(range(rows)) if upper else range(rows):
        row = sliced(call, solution, rank - 2, k, 1)
        column = sliced(call, data, rank - 1, k, 1)
        if not unitriangular:
            row = call.emit(_op.divide(row, sliced(call, column, rank - 2, k, 1)))
        later = relax.const(places < k if upper else places > k)
        column = call.emit(_op.where(later, column, scalar(0, kind)))
        rest = call.emit(_op.subtract(solution, call.emit(_op.multiply(column, row))))
        solution = call.emit(_op.where(relax.const(places == k), row, rest))
    return solution if left else _transposed(call, solution)


def _pivots(call: Call, data: relax.Expr) -> tuple:
    """Return the sign that the exchanges of rows give the determinant, and the pivots."""
    none = call.emit(_op.zeros([*extents_of(data)[:-1], 1], dtype(data)))
    _, sign, pivots = _eliminated(call, data, none)
    pivots = call.emit(_op.concat(pivots, data.ty.ndim - 2))
    return sign, pivots


@converts(LINALG, "_linalg_det.default")
def _determinant(call: Call, A: relax.Expr) -> tuple:
    sign, pivots = _pivots(call, A)
    product = call.emit(_op.prod(pivots, [-2, -1]))
    return _op.multiply(call.reshape(sign, call.shape), product), None, None


@converts(LINALG, "_linalg_slogdet.default")
def _log_determinant(call: Call, A: relax.Expr) -> tuple:
    sign, pivots = _pivots(call, A)
    fixed = call.emit(stop_gradient(pivots))
    signs = call.emit(_op.prod(call.emit(_op.sign(fixed)), [-2, -1]))
    sign = call.emit(_op.multiply(call.reshape(sign, call.shape), signs))
    sizes = call.emit(_op.log(call.emit(_op.abs(pivots))))
    return sign, call.emit(_op.sum(sizes, [-2, -1])), None, None


@converts(LINALG, "linalg_matrix_exp.default")
def _exponential(call: Call, data: relax.Expr) -> relax.Expr:
    """The series of a matrix whose norm halvings have brought below 1, squared as often.

    The result is NaN for norms above 4096.
    """
    kind, rows = dtype(data), _rows_of(data)
    data = call.cast(data, "float64")
    identity = _identity(rows, rows, "float64")
    size = call.emit(_op.abs(call.emit(stop_gradient(data))))
    size = call.emit(_op.max(call.emit(_op.sum(size, [-2], True)), [-1], True))
    floor = call.emit(_op.maximum(size, scalar(1, "float64")))
    halvings = call.emit(_op.ceil(_op.multiply(_op.log(floor), scalar(1 / math.log(2), "float64"))))
    small = call.emit(_op.exp(_op.multiply(halvings, scalar(-math.log(2), "float64"))))
    allowed = call.emit(_op.less_equal(halvings, scalar(_SQUARINGS, "float64")))
    small = call.emit(_op.where(allowed, small, scalar(math.nan, "float64")))
    data = call.emit(_op.multiply(data, small))
    result = identity
    for k in range(_TERMS, 0, -1):
        term = call.emit(_op.matmul(data, result)) if k < _TERMS else data
        result = call.emit(_op.add(identity, _op.multiply(term, scalar(1 / k, "float64"))))
    for k in range(_SQUARINGS):
        more = call.emit(_op.greater(halvings, scalar(k, "float64")))
        result = call.emit(_op.where(more, call.emit(_op.matmul(result, result)), result))
    return call.cast(result, kind)


@converts(LINALG, "linalg_householder_product.default")
def _reflections(call: Call, data: relax.Expr, tau: relax.Expr) -> relax.Expr:
    """The columns below the diagonal are the vectors of the reflections, whose own elements are
    1."""
    kind, rank = dtype(data), data.ty.ndim
    rows, columns = static(extents_of(data)[-2:], "the size of the matrix")
    (count,) = static(extents_of(tau)[-1:], "the number of reflections")
    orthogonal = call.emit(_op.broadcast_to(_identity(rows, columns, kind), extents_of(data)))
    for k in reversed(range(count)):
        places = np.arange(rows).reshape(rows, 1)
        own = _op.where(relax.const(places == k), scalar(1, kind), scalar(0, kind))
        vector = sliced(call, data, rank - 1, k, 1)
        vector = call.emit(_op.where(relax.const(places > k), vector, call.emit(own)))
        factor = call.emit(_op.expand_dims(sliced(call, tau, rank - 2, k, 1), -1))
        product = call.emit(_op.matmul(_transposed(call, vector), orthogonal))
        change = call.emit(_op.matmul(vector, product))
        orthogonal = call.emit(_op.subtract(orthogonal, _op.multiply(factor, change)))
    return orthogonal
