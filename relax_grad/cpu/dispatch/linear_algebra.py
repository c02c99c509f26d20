"""Kernels of matrix products."""

from __future__ import annotations

from functools import partial
from math import prod

from tvm import relax
from tvm.ir import Op

from ..kernel.matmul import Matmul, matmul
from .registry import CallSite, Kernel, kernel_for

_PERMUTE = Op.get("relax.permute_dims")


@kernel_for("relax.matmul")
def matrix_product(site: CallSite) -> Kernel | None:
    """Return the kernel of a product of matrices, or of stacks of matrices.

    The stacks have equal batch axes, or one factor is a single matrix. A factor that is bound to a
    transposed matrix is read transposed.
    """
    (a, transpose_a), (b, transpose_b) = (_untransposed(site, factor) for factor in site.call.args)
    shapes = site.shapes(a, b, site.call)
    if shapes is None or min(map(len, shapes[:2])) < 2:
        return None
    shape_a, shape_b, _ = shapes
    rows, depth = shape_a[:-3:-1] if transpose_a else shape_a[-2:]
    columns = shape_b[-2] if transpose_b else shape_b[-1]
    batch_a, batch_b = shape_a[:-2], shape_b[:-2]
    if not batch_b and not transpose_a:
        # The rows of all matrices, one after the other, are the rows of one matrix.
        product = Matmul(prod(batch_a) * rows, columns, depth, transpose_b=transpose_b)
    elif batch_a == batch_b or not batch_a or not batch_b:
        product = Matmul(
            rows,
            columns,
            depth,
            transpose_a,
            transpose_b,
            batch=prod(batch_a or batch_b),
            shared_a=not batch_a,
            shared_b=not batch_b,
        )
    else:
        return None
    generator = partial(matmul, product, site.cpu, shapes=shapes)
    return Kernel(generator, [a, b])


def _untransposed(site: CallSite, factor: relax.Expr) -> tuple[relax.Expr, bool]:
    """Return (operand, True) if a factor is an operand with its last two axes exchanged, else
    (factor, False)."""
    value = site.lookup(factor) if isinstance(factor, relax.Var) else None
    if not (isinstance(value, relax.Call) and value.op == _PERMUTE):
        return factor, False
    ndim = value.args[0].ty.ndim
    axes = value.attrs.axes
    axes = range(ndim)[::-1] if axes is None else [int(axis) % ndim for axis in axes]
    exchanged = [*range(ndim - 2), ndim - 1, ndim - 2]
    is_exchange = ndim >= 2 and list(axes) == exchanged
    return (value.args[0], True) if is_exchange else (factor, False)
