"""Tensor expressions of the gradients of reductions."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from ._util import Shape, accumulation_dtype, is_empty, zeros


def mean_backward_x(
    output_grad: te.Tensor, x_shape: Shape, axes: Sequence[int], keepdims: bool
) -> te.Tensor:
    """Gradient of mean: what each mean receives, divided by the number of its elements.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``mean(x, axes, keepdims)``.
    x_shape : Sequence[int or PrimExpr]
        The shape of ``x``.
    axes : Sequence[int]
        The axes that were averaged over; none of them negative.
    keepdims : bool
        Whether ``output_grad`` has these axes, with extent 1.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``x_shape`` and the dtype of ``output_grad``. The count does not pass through
        half precision, which holds none above 65504.
    """
    if is_empty(x_shape):
        return zeros(x_shape, output_grad.dtype)
    dtype = accumulation_dtype(output_grad.dtype)
    count = tirx.const(1, "int64")
    for axis in axes:
        count = count * x_shape[axis]

    def element(*index):
        if keepdims:
            at = [0 if axis in axes else i for axis, i in enumerate(index)]
        else:
            at = [i for axis, i in enumerate(index) if axis not in axes]
        mean = output_grad(*at).astype(dtype) / count.astype(dtype)
        return mean.astype(output_grad.dtype)

    return te.compute(x_shape, element, name="mean_backward_x")
