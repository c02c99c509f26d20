"""Tensor expressions of products with weights of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

from .util import Shape, fill_where_empty


def quantized_matmul(
    data: te.Tensor, weight: te.Tensor, scale: te.Tensor, zero_point: te.Tensor | None
) -> te.Tensor:
    """Multiply data by a transposed weight.

    Parameters
    ----------
    data : te.Tensor
        The data, ``(..., inputs)``.
    weight : te.Tensor
        The numbers, ``(outputs, groups, width)``: of int8, or two of 4 bits in each element of
        uint8.
    scale : te.Tensor
        The scales, ``(outputs, groups)``, of the dtype of ``data``.
    zero_point : te.Tensor or None
        The numbers that stand for 0, ``(outputs, groups)``; None for 0 of int8, and 8 of uint8.

    Returns
    -------
    result : te.Tensor
        ``(..., outputs)``.
    """
    element = _elements(weight, scale, zero_point, data.dtype)
    k = te.reduce_axis((0, data.shape[-1]), "k")
    return te.compute(
        [*data.shape[:-1], weight.shape[0]],
        lambda *i: te.sum(data(*i[:-1], k) * element(i[-1], k), axis=k),
        name="quantized_matmul",
    )


def quantized_matmul_backward_data(
    output_grad: te.Tensor,
    data_shape: Shape,
    weight: te.Tensor,
    scale: te.Tensor,
    zero_point: te.Tensor | None,
) -> te.Tensor:
    """Multiply a gradient by a weight.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient, ``(..., outputs)``.
    data_shape : Sequence[int or PrimExpr]
        The shape of the result, ``(..., inputs)``.
    weight, scale, zero_point
        As for :func:`quantized_matmul`.

    Returns
    -------
    result : te.Tensor
        ``(..., inputs)``.
    """
    element = _elements(weight, scale, zero_point, output_grad.dtype)
    n = te.reduce_axis((0, weight.shape[0]), "n")
    total = te.compute(
        data_shape,
        lambda *i: te.sum(output_grad(*i[:-1], n) * element(n, i[-1]), axis=n),
        name="quantized_matmul_backward_data",
    )
    return fill_where_empty(total, [weight.shape[0]])


def _elements(
    weight: te.Tensor, scale: te.Tensor, zero_point: te.Tensor | None, dtype: str
) -> Callable[..., tirx.PrimExpr]:
    """Return a function of a row and a column that returns the element of the weight."""
    is_packed = weight.dtype == "uint8"
    width = int(weight.shape[2])
    size = 2 * width if is_packed else width

    def element(row: tirx.PrimExpr, column: tirx.PrimExpr) -> tirx.PrimExpr:
        group, at = column // size, column % size
        if is_packed:
            pair = weight(row, group, at // 2).astype("int32")
            number = (pair >> (at % 2 * 4).astype("int32")) & 15
        else:
            number = weight(row, group, at).astype("int32")
        if zero_point is not None:
            value = number.astype(dtype) - zero_point(row, group).astype(dtype)
        else:
            value = (number - 8 if is_packed else number).astype(dtype)
        return value * scale(row, group)

    return element
