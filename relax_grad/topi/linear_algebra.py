"""Tensor expressions of linear algebra."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .util import Shape, cast, fill_where_empty, is_empty, is_one, zeros


def einsum(operands: Sequence[te.Tensor], labels: Sequence[str], output: str) -> te.Tensor:
    """Compute an einsum, as ``topi.einsum`` does.

    Unlike ``topi.einsum``, it accumulates half precision in float32, and returns 0 for a sum over
    an empty axis.

    Parameters
    ----------
    operands : Sequence[te.Tensor]
        The operands, of one dtype.
    labels : Sequence[str]
        For each operand, the letters of its axes. An axis of extent 1 is broadcast.
    output : str
        The letters of the axes of the result, each once. All other letters are summed over.

    Returns
    -------
    result : te.Tensor
        A tensor of the dtype of the operands.
    """
    extents: dict[str, tirx.PrimExpr] = {}
    for operand, letters in zip(operands, labels, strict=True):
        for letter, extent in zip(letters, operand.shape, strict=True):
            if letter not in extents or is_one(extents[letter]):
                extents[letter] = extent
    shape = [extents[letter] for letter in output]
    summed = [letter for letter in extents if letter not in output]
    if is_empty([extents[letter] for letter in summed]):
        return zeros(shape, operands[0].dtype)
    dtype = accumulation_dtype(operands[0].dtype)
    over = {letter: te.reduce_axis((0, extents[letter]), letter) for letter in summed}

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = {**over, **dict(zip(output, index, strict=True))}
        product = None
        for operand, letters in zip(operands, labels, strict=True):
            value = operand(
                *(
                    0 if is_one(extent) else at[letter]
                    for letter, extent in zip(letters, operand.shape, strict=True)
                )
            ).astype(dtype)
            product = value if product is None else product * value
        return te.sum(product, axis=list(over.values())) if over else product

    total = te.compute(shape, element, name="einsum")
    total = fill_where_empty(total, [extents[letter] for letter in summed])
    return cast(total, operands[0].dtype)


def matmul_in_parts(a: te.Tensor, b: te.Tensor, parts: int) -> te.Tensor:
    """Compute the equal parts of the sums of a matrix product.

    Parameters
    ----------
    a, b : te.Tensor
        Matrices of shapes ``(m, k)`` and ``(k, n)``.
    parts : int
        The number of parts, a divisor of ``k``.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``(parts, m, n)``, whose sum over the first axis is the product. The parts
        of products in half precision are in float32.
    """
    dtype = accumulation_dtype(a.dtype, b.dtype)
    rows, terms = a.shape
    size = terms // parts
    within = te.reduce_axis((0, size), "k")
    return te.compute(
        (parts, rows, b.shape[1]),
        lambda part, i, j: te.sum(
            a(i, part * size + within).astype(dtype) * b(part * size + within, j).astype(dtype),
            within,
        ),
        name="matmul_in_parts",
    )


def einsum_backward_operand(
    output_grad: te.Tensor, operand_shape: Shape, labels: str, output: str
) -> te.Tensor:
    """Gradient of an einsum of one operand with respect to it.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    operand_shape : Sequence[int or PrimExpr]
        The shape of the operand.
    labels : str
        The letters of the operand's axes; a repeated letter selects a diagonal.
    output : str
        The letters of the axes of the result, each once.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``operand_shape`` and the dtype of ``output_grad``.
    """

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at: dict[str, tirx.PrimExpr] = {}
        diagonal = []
        for letter, i in zip(labels, index, strict=True):
            if letter in at:
                diagonal.append(at[letter] == i)
            else:
                at[letter] = i
        value = output_grad(*(at[letter] for letter in output))
        if not diagonal:
            return value
        return tirx.if_then_else(tirx.all(*diagonal), value, tirx.const(0, output_grad.dtype))

    return te.compute(
        operand_shape, element, name="einsum_backward_operand", tag=topi.tag.INJECTIVE
    )
