"""Tensor expressions that the gradients of the normalisations need."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi

from ._util import Shape, accumulation_dtype


def divide_by_count(data: te.Tensor, of_shape: Shape, axes: Sequence[int]) -> te.Tensor:
    """Divide by the number of elements that a tensor of the given shape has along the axes.

    Parameters
    ----------
    data : te.Tensor
        What to divide.
    of_shape : Sequence[int or PrimExpr]
        The shape to count in.
    axes : Sequence[int]
        The axes to count along; none of them negative.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of ``data``. The count does not pass through half
        precision, which holds none above 65504.
    """
    dtype = accumulation_dtype(data.dtype)
    count = tirx.const(1, "int64")
    for axis in axes:
        count = count * of_shape[axis]
    return te.compute(
        data.shape,
        lambda *i: (data(*i).astype(dtype) / count.astype(dtype)).astype(data.dtype),
        name="divide_by_count",
        tag=topi.tag.ELEMWISE,
    )
