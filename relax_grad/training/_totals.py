"""Totals of all gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from tvm import relax
from tvm.relax import op

from ..ir.compat import dtype_of
from ._tensors import finite

#: Emits a total of some tensors.
Total = Callable[[Callable, "Iterable[relax.Expr]"], relax.Expr]


def total_over_workers(
    emit: Callable, gradients: Mapping[str, relax.Expr], divided: Collection[str], total: Total
) -> relax.Expr:
    """Emit a total that counts the parts of divided gradients on all workers, and the other gradients once.

    Parameters
    ----------
    emit : Callable
        Binds a value.
    gradients : Mapping[str, relax.Expr]
        The gradients by the names of their parameters.
    divided : Collection[str]
        The names of those of which each worker has a part.
    total : Total
        Emits the total of a worker's tensors.
    """
    own = [each for name, each in gradients.items() if name in divided]
    others = [each for name, each in gradients.items() if name not in divided]
    if not own:
        return total(emit, others)
    found = emit(op.ccl.allreduce(total(emit, own), "sum", False))
    return _sum(emit, found, total(emit, others)) if others else found


def sum_of_squares(emit, tensors) -> relax.Expr:
    """Emit the sum of the squares of all elements."""
    total = None
    for each in tensors:
        square = emit(op.sum(op.multiply(each, each)))
        if dtype_of(square.ty) == "float64":
            square = (
                emit(op.astype(square, "float32"))
                if total is not None and dtype_of(total.ty) == "float32"
                else square
            )
        total = square if total is None else _sum(emit, total, square)
    return total


def count_of_invalid(emit, tensors) -> relax.Expr:
    """Emit the number of elements that are infinite or NaN."""
    total = None
    for each in tensors:
        count = emit(op.sum(invalid(each)))
        total = count if total is None else emit(op.add(total, count))
    return total


def _sum(emit, a, b):
    """Return the sum of two scalars, in the wider of their dtypes."""
    if dtype_of(a.ty) != dtype_of(b.ty):
        a, b = (op.astype(each, "float64") for each in (a, b))
    return emit(op.add(a, b))


def invalid(x: relax.Expr) -> relax.Expr:
    """Return 1 in float32 for each element that is infinite or NaN, else 0."""
    return op.subtract(relax.const(1.0, "float32"), op.astype(finite(x), "float32"))
