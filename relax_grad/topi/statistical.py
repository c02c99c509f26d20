"""Tensor expressions of reductions that may be empty, and of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .util import Shape, count_along, fill_where_empty, is_empty, zeros


def sum(x: te.Tensor, axes: Sequence[int], keepdims: bool) -> te.Tensor:
    """Sum over axes that may be empty: like ``topi.sum``, with 0 for an empty sum."""
    return fill_where_empty(topi.sum(x, axes, keepdims), [x.shape[axis] for axis in axes], 0)


def prod(x: te.Tensor, axes: Sequence[int], keepdims: bool) -> te.Tensor:
    """Multiply over axes that may be empty: like ``topi.prod``, with 1 for an empty product."""
    return fill_where_empty(topi.prod(x, axes, keepdims), [x.shape[axis] for axis in axes], 1)


def mean(x: te.Tensor, axes: Sequence[int], keepdims: bool) -> te.Tensor:
    """Average over axes that may be empty, with NaN for an empty mean."""
    return topi.divide(sum(x, axes, keepdims), count_along(x.shape, axes))


def variance(x: te.Tensor, axes: Sequence[int], keepdims: bool) -> te.Tensor:
    """Average the squared deviations over axes that may be empty, with NaN for no elements."""
    deviation = x - mean(x, axes, True)
    return mean(deviation * deviation, axes, keepdims)


def std(x: te.Tensor, axes: Sequence[int], keepdims: bool) -> te.Tensor:
    """Return the square root of :func:`variance`."""
    return topi.sqrt(variance(x, axes, keepdims))


def median(x: te.Tensor, axes: Sequence[int], out_shape: Shape) -> tuple[te.Tensor, te.Tensor]:
    """Median over any axes: the lower one for an even number of elements, NaN for no elements.

    Parameters
    ----------
    x : te.Tensor
        The data, of a dtype that TVM sorts.
    axes : Sequence[int]
        The axes that are reduced, all non-negative.
    out_shape : Sequence[int or PrimExpr]
        The extents of the axes that stay, and any number of extents 1.

    Returns
    -------
    value, index : te.Tensor
        Tensors of shape ``out_shape``: the median, and, in int64, its position in the flattened
        axes.
    """
    if is_empty(out_shape):
        return zeros(out_shape, x.dtype), zeros(out_shape, "int64")
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    kept_shape = [x.shape[axis] for axis in kept]
    count = count_along(x.shape, axes)
    of_nothing = float("nan") if "float" in str(x.dtype) else 0
    if is_empty(x.shape):
        return full(out_shape, of_nothing, x.dtype), zeros(out_shape, "int64")
    rows = topi.reshape(topi.transpose(x, [*kept, *axes]), [*kept_shape, count])
    order = topi.argsort(rows, axis=len(kept), dtype="int64")

    def middle(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        index = order(*at, tirx.floordiv(count - 1, 2))
        return tirx.if_then_else(count > 0, index, tirx.const(0, "int64"))

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        value = rows(*at, index(*at))
        return tirx.if_then_else(count > 0, value, tirx.const(of_nothing, x.dtype))

    index = te.compute(kept_shape, middle, name="median_index")
    value = te.compute(kept_shape, element, name="median")
    return topi.reshape(value, out_shape), topi.reshape(index, out_shape)


def full(shape: Shape, fill: float, dtype: str) -> te.Tensor:
    """Return a tensor with all elements equal to ``fill``."""
    return te.compute(
        shape, lambda *_: tirx.const(fill, dtype), name="full", tag=topi.tag.INJECTIVE
    )


def mean_backward_x(
    output_grad: te.Tensor, x_shape: Shape, axes: Sequence[int], keepdims: bool
) -> te.Tensor:
    """Gradient of mean: the gradient of each mean, divided by the number of its elements.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``mean(x, axes, keepdims)``.
    x_shape : Sequence[int or PrimExpr]
        The shape of ``x``.
    axes : Sequence[int]
        The axes that were averaged over, all non-negative.
    keepdims : bool
        Whether ``output_grad`` has these axes, with extent 1.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``x_shape`` and the dtype of ``output_grad``. The count is not converted
        to half precision, which overflows above 65504.
    """
    if is_empty(x_shape):
        return zeros(x_shape, output_grad.dtype)
    dtype = accumulation_dtype(output_grad.dtype)
    count = count_along(x_shape, axes)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        if keepdims:
            at = [0 if axis in axes else i for axis, i in enumerate(index)]
        else:
            at = [i for axis, i in enumerate(index) if axis not in axes]
        mean = output_grad(*at).astype(dtype) / count.astype(dtype)
        return mean.astype(output_grad.dtype)

    return te.compute(x_shape, element, name="mean_backward_x")
