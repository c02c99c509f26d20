"""Totals of all gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from tvm import relax
from tvm.relax import op

from ..ir.compat import dtype_of
from ._tensors import Emit, finite

#: Emits a total of some tensors.
Total = Callable[[Callable, "Iterable[relax.Expr]"], relax.Expr]


def total_over_workers(
    emit: Callable, gradients: Mapping[str, relax.Expr], divided: Collection[str], total: Total
) -> relax.Expr:
    """Emit a total that counts the parts of divided gradients on all workers of a group, and the
    other gradients once.

    Parameters
    ----------
    emit : Callable
        Binds a value.
    gradients : Mapping[str, relax.Expr]
        The gradients by the names of their parameters.
    divided : Collection[str]
        The names of the parameters of which each worker has a part.
    total : Total
        Emits the total of a worker's tensors.
    """
    own = [gradient for name, gradient in gradients.items() if name in divided]
    others = [gradient for name, gradient in gradients.items() if name not in divided]
    if not own:
        return total(emit, others)
    of_parts = emit(op.ccl.allreduce(total(emit, own), "sum", True))
    return _sum(emit, of_parts, total(emit, others)) if others else of_parts


def sum_of_squares(emit: Emit, tensors: Iterable[relax.Expr]) -> relax.Expr:
    """Emit the sum of the squares of all elements."""
    total = None
    for tensor in tensors:
        square = emit(op.sum(op.multiply(tensor, tensor)))
        if dtype_of(square.ty) == "float64":
            square = (
                emit(op.astype(square, "float32"))
                if total is not None and dtype_of(total.ty) == "float32"
                else square
            )
        total = square if total is None else _sum(emit, total, square)
    return total


def count_of_invalid(emit: Emit, tensors: Iterable[relax.Expr]) -> relax.Expr:
    """Emit the number of elements that are infinite or NaN."""
    total = None
    for tensor in tensors:
        count = emit(op.sum(invalid(tensor)))
        total = count if total is None else emit(op.add(total, count))
    return total


def _sum(emit: Emit, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    """Return the sum of two scalars, in the wider of their dtypes."""
    if dtype_of(a.ty) != dtype_of(b.ty):
        a, b = (op.astype(scalar, "float64") for scalar in (a, b))
    return emit(op.add(a, b))


def invalid(x: relax.Expr) -> relax.Expr:
    """Return 1 in float32 for each element that is infinite or NaN, else 0."""
    return op.subtract(relax.const(1.0, "float32"), op.astype(finite(x), "float32"))
