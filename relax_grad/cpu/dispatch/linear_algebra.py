"""Kernels of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

from tvm import relax, tirx
from tvm.ir import Op

from ...ir.compat import constant_tensor, dtype_of
from ...ir.shapes import static_extents
from ..kernel.matmul import shared_panels as panels
from ..kernel.matmul.matmul import Matmul, matmul
from ..target import CPU
from .registry import CallSite, Kernel, kernel_for
from .residuals import BlockCalls, Describe, Description, ResidualKernel, residuals_for

_PERMUTE = Op.get("relax.permute_dims")


@kernel_for("relax.matmul", takes_uncast=False)
def matrix_product(site: CallSite) -> Kernel | None:
    """Return the kernel of a product of matrices, or of stacks of matrices.

    The stacks have equal batch axes, or one factor is a single matrix. A factor that is bound to a
    transposed matrix is read transposed. Of a constant, the kernel may read panels instead.
    """
    of_constant = _product_by_constant(site)
    if of_constant is not None:
        return of_constant
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
    return Kernel(generator, [a, b], product=product)


def _untransposed(site: CallSite, factor: relax.Expr) -> tuple[relax.Expr, bool]:
    """Return (operand, True) if a factor is an operand with its last two axes exchanged, else
    (factor, False)."""
    value = site.lookup(factor) if isinstance(factor, relax.Var) else None
    if not (isinstance(value, relax.Call) and value.op == _PERMUTE):
        return factor, False
    return (value.args[0], True) if _is_exchange(value) else (factor, False)


def _is_exchange(call: relax.Call) -> bool:
    """Tell whether a permute_dims exchanges the last two axes."""
    ndim, axes = call.args[0].ty.ndim, call.attrs.axes
    axes = range(ndim)[::-1] if axes is None else [int(axis) % ndim for axis in axes]
    return ndim >= 2 and list(axes) == [*range(ndim - 2), ndim - 1, ndim - 2]


class _Factor(NamedTuple):
    """A second factor, and the number of products that share its panels."""

    matrix: relax.Var
    is_transposed: bool
    fewest: int


@residuals_for("relax.matmul")
def with_panels(site: CallSite, var: relax.Var, calls: BlockCalls) -> ResidualKernel | None:
    """Return a product that also returns the panels of its second factor, for later products."""
    call = calls.original(var)
    key = None if call is None else _shared_factor(calls, call, site.cpu)
    if key is None:
        return None
    later: list[relax.Var] = []
    while (replaced := calls.take(var, "relax.matmul", _sharing(site.cpu), key)) is not None:
        later.extend(replaced)
    factor, is_transposed = _untransposed(site, site.call.args[1])
    if 1 + len(later) < key.fewest or is_transposed != key.is_transposed:
        return None

    def use(call: relax.Call, saved: Sequence[relax.Var]) -> Kernel:
        operands = [call.args[0], *saved]
        return _kernel(panels.matmul_of_panels, call, is_transposed, site.cpu, operands)

    operands = [site.call.args[0], factor]
    first = _kernel(panels.matmul_with_panels, site.call, is_transposed, site.cpu, operands)
    shape = panels.panels_shape(first.generator.args[0], site.cpu)
    return ResidualKernel(first, [relax.TensorType(shape, "float32")], dict.fromkeys(later, use))


def _product_by_constant(site: CallSite) -> Kernel | None:
    """Return the kernel of a product by a constant matrix whose panels are a constant too; None if
    the kernel reads the matrix itself."""
    if site.packed is None:
        return None
    data = site.call.args[0]
    matrix, is_transposed = _untransposed(site, site.call.args[1])
    value, product = constant_tensor(matrix), _rows_by_matrix(site.call, is_transposed)
    if value is None or product is None or _untransposed(site, data)[1]:
        return None
    if panels.fewest_sharing(product, site.cpu) is None:
        return None
    shape = panels.panels_shape(product, site.cpu)
    key = (matrix, is_transposed, tuple(shape))
    if key not in site.packed:
        numbers = value.numpy()
        site.packed[key] = relax.const(
            panels.packed(numbers.T if is_transposed else numbers, shape)
        )
    operands = [data, site.packed[key]]
    return _kernel(panels.matmul_of_panels, site.call, is_transposed, site.cpu, operands)


def _kernel(
    make: Callable[..., tirx.PrimFunc],
    call: relax.Call,
    is_transposed: bool,
    cpu: CPU,
    operands: Sequence[relax.Expr],
) -> Kernel:
    """Return a kernel of a product by a matrix, which takes these operands."""
    shapes = [static_extents(tensor.ty) for tensor in (*operands, call)]
    return Kernel(partial(make, _rows_by_matrix(call, is_transposed), cpu, shapes), operands)


@lru_cache
def _sharing(cpu: CPU) -> Describe:
    """Return the description of products by their second factor."""

    def describe(calls: BlockCalls, var: relax.Var, call: relax.Call) -> Description | None:
        factor = _shared_factor(calls, call, cpu)
        return None if factor is None else (factor, (var,))

    return describe


def _shared_factor(calls: BlockCalls, call: relax.Call, cpu: CPU) -> _Factor | None:
    """Return the second factor of a product, if products may share its panels."""
    data, matrix = call.args
    permuted = calls.of(matrix, "relax.permute_dims")
    is_transposed = False
    if permuted is not None and _is_exchange(permuted):
        matrix, is_transposed = permuted.args[0], True
    product = _rows_by_matrix(call, is_transposed)
    # The rows of a transposed A are copied; few products of one factor have such rows.
    if product is None or calls.of(data, "relax.permute_dims") is not None:
        return None
    fewest = panels.fewest_sharing(product, cpu)
    is_variable = isinstance(matrix, relax.Var)
    return _Factor(matrix, is_transposed, fewest) if is_variable and fewest is not None else None


def _rows_by_matrix(call: relax.Call, transpose_b: bool) -> Matmul | None:
    """Return the product of the rows of a tensor and a matrix, of float32 and static shapes; None
    for others."""
    rows, matrix = (static_extents(factor.ty) for factor in call.args)
    if rows is None or matrix is None or len(rows) < 2 or len(matrix) != 2:
        return None
    if any(dtype_of(tensor.ty) != "float32" for tensor in (*call.args, call)):
        return None
    return Matmul(prod(rows[:-1]), matrix[1], matrix[0], transpose_b=transpose_b)
