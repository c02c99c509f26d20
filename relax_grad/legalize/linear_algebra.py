"""Legalization of linear algebra: the backward operators, and matmul and einsum, for which TVM's
are wrong."""

from __future__ import annotations

from tvm import relax

from ..ir.compat import dtype_of
from ..ir.dtypes import HALVES
from ..ir.module import tuple_fields
from ..op.linear_algebra import einsum_labels
from ..registry import register_legalize
from ..topi import linear_algebra as topi_linear_algebra
from ..topi.util import is_static, on_gpu
from ._gpu import add_parts, bind_threads, parts_of_product
from ._util import shape_values, stock, zero_where_empty

_STOCK_EINSUM, _STOCK_MATMUL = stock("relax.einsum"), stock("relax.matmul")


@register_legalize(
    "relax.matmul",
    corrects="is undefined where a symbolic summation axis is empty; on a GPU, wrong where the sum "
    "has a single term and another function reads it",
)
def _matmul(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    parts = _parts_of_sums(call)
    if parts:
        return _in_parts(bb, call, parts)
    product = bind_threads(bb, _STOCK_MATMUL(bb, call), always=False)
    a, b = (operand.ty.shape.values for operand in call.args)
    extents = [a[-1], b[-2 if len(b) > 1 else 0]]
    # TVM's legalization is correct if the extent is known.
    if is_static(extents[0]) or (is_static(extents[1]) and int(extents[1]) > 0):
        return product
    return zero_where_empty(bb, product, extents[:1])


def _parts_of_sums(call: relax.Call) -> int | None:
    """Return the number of parts into which the sums of a product are divided, so that a GPU has
    enough blocks, or None.

    Products of float16 stay whole: TVM's rule computes them on tensor cores.
    """
    shapes = [operand.ty.shape.values for operand in call.args]
    dtypes = ("float32", "float64", "bfloat16")
    are_plain = all(dtype_of(each.ty) in dtypes for each in (*call.args, call))
    if not on_gpu() or not are_plain or any(len(shape) != 2 for shape in shapes):
        return None
    if not all(is_static(extent) for shape in shapes for extent in shape):
        return None
    (rows, terms), (_, columns) = (map(int, shape) for shape in shapes)
    parts = parts_of_product(rows, columns, [terms])
    return parts[0] if parts else None


def _in_parts(bb: relax.BlockBuilder, call: relax.Call, parts: int) -> relax.Expr:
    partial = bb.call_te(
        topi_linear_algebra.matmul_in_parts,
        *call.args,
        parts,
        primfunc_name_hint="matmul_parts",
    )
    return add_parts(bb, partial, 1, dtype_of(call.ty))


@register_legalize(
    "relax.einsum",
    corrects="accumulates half precision in half precision, leaves a sum over an empty axis "
    "undefined, and refuses to sum over an ellipsis",
)
def _einsum(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    (operands,) = call.args
    types = operands.ty.fields
    labels, output = einsum_labels(str(call.attrs.subscripts), [ty.ndim for ty in types])
    never_empty = all(
        letter in output or (is_static(extent) and int(extent) > 0)
        for ty, letters in zip(types, labels, strict=True)
        for letter, extent in zip(letters, ty.shape.values, strict=True)
    )
    inputs, _, result = str(call.attrs.subscripts).partition("->")
    ellipsis_kept = "..." not in inputs or not result or "..." in result
    if dtype_of(call.ty) not in HALVES and never_empty and ellipsis_kept:
        return bind_threads(bb, _STOCK_EINSUM(bb, call), always=False)
    product = bb.call_te(
        topi_linear_algebra.einsum,
        tuple_fields(operands),
        labels,
        output,
        primfunc_name_hint="einsum",
    )
    # TVM's rules do not schedule a sum to a scalar that a cast reads.
    return bind_threads(bb, product, always=call.ty.ndim == 0)


@register_legalize("relax.grad.einsum_backward_operand")
def _einsum_backward_operand(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    output_grad, operand_shape = call.args
    shape = shape_values(operand_shape)
    (labels,), output = einsum_labels(str(call.attrs.subscripts), [len(shape)])
    gradient = bb.call_te(
        topi_linear_algebra.einsum_backward_operand,
        output_grad,
        shape,
        labels,
        output,
        primfunc_name_hint="einsum_backward_operand",
    )
    return bind_threads(bb, gradient, always=call.ty.ndim == 0)
