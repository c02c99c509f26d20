"""Tensor expressions of the operators that join and split tensors, and of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .util import Shape, cast, is_empty, zeros


def concat_backward_tensors(
    output_grad: te.Tensor, shapes: Sequence[Shape], axis: int
) -> list[te.Tensor]:
    """Gradient of concat with respect to its tensors: each tensor's slice of the gradient.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``concat(tensors, axis)``.
    shapes : Sequence[Sequence[int or PrimExpr]]
        The shape of each tensor.
    axis : int
        The axis along which they were concatenated.

    Returns
    -------
    result : list[te.Tensor]
        A tensor for each shape, of the dtype of ``output_grad``.
    """

    def part(shape: Shape, begin: int | tirx.PrimExpr) -> te.Tensor:
        def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
            at = list(index)
            at[axis] = at[axis] + begin
            return output_grad(*at)

        return te.compute(shape, element, name="concat_backward", tag=topi.tag.INJECTIVE)

    parts, begin = [], 0
    for shape in shapes:
        parts.append(part(shape, begin))
        begin = begin + shape[axis]
    return parts


def split(
    data: te.Tensor, part_shapes: Sequence[Shape], begins: Sequence[tirx.PrimExpr], axis: int
) -> list[te.Tensor]:
    """Split a tensor along an axis; unlike for ``topi.split``, parts may be empty, overlap, or be
    symbolic.

    Parameters
    ----------
    data : te.Tensor
        The data.
    part_shapes : Sequence[Sequence[int or PrimExpr]]
        The shape of each part.
    begins : Sequence[int or PrimExpr]
        The begin of each part along the axis.
    axis : int
        The axis.

    Returns
    -------
    result : list[te.Tensor]
        The parts, of the dtype of ``data``.
    """

    def part(shape: Shape, begin: int | tirx.PrimExpr) -> te.Tensor:
        if is_empty(shape):
            return zeros(shape, data.dtype)

        def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
            at = list(index)
            at[axis] = at[axis] + begin
            return data(*at)

        return te.compute(shape, element, name="split", tag=topi.tag.INJECTIVE)

    return [part(*shape_and_begin) for shape_and_begin in zip(part_shapes, begins, strict=True)]


def split_backward_x(
    output_grads: Sequence[te.Tensor], x_shape: Shape, begins: Sequence[tirx.PrimExpr], axis: int
) -> te.Tensor:
    """Gradient of split with respect to its data: each element sums its gradients in all parts.

    Parameters
    ----------
    output_grads : Sequence[te.Tensor]
        The gradients with respect to the parts.
    x_shape : Sequence[int or PrimExpr]
        The shape of the data.
    begins : Sequence[int or PrimExpr]
        The begin of each part along the axis.
    axis : int
        The axis.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``x_shape`` and the dtype of the output gradients.
    """
    dtype = accumulation_dtype(output_grads[0].dtype)
    parts = [
        (grad, begin)
        for grad, begin in zip(output_grads, begins, strict=True)
        if not is_empty(grad.shape)
    ]

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        total = tirx.const(0, dtype)
        for grad, begin in parts:
            at = list(index)
            at[axis] = at[axis] - begin
            inside = tirx.all(at[axis] >= 0, at[axis] < grad.shape[axis])
            total += tirx.if_then_else(inside, grad(*at).astype(dtype), tirx.const(0, dtype))
        return total

    total = te.compute(x_shape, element, name="split_backward_x", tag=topi.tag.INJECTIVE)
    return cast(total, output_grads[0].dtype)


def stack_backward_tensors(output_grad: te.Tensor, axis: int) -> list[te.Tensor]:
    """Gradient of stack with respect to its tensors: the slices along the axis.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``stack(tensors, axis)``; its extent along the
        axis is a constant.
    axis : int
        The axis that stack has added; a negative one counts from the last of ``output_grad``.

    Returns
    -------
    result : list[te.Tensor]
        A tensor for each slice, of the dtype of ``output_grad``.
    """
    axis %= len(output_grad.shape)
    shape = list(output_grad.shape)
    count = int(shape.pop(axis))
    if is_empty(shape):
        return [zeros(shape, output_grad.dtype) for _ in range(count)]

    def part(i: int) -> te.Tensor:
        return te.compute(
            shape,
            lambda *index: output_grad(*index[:axis], i, *index[axis:]),
            name="stack_backward",
            tag=topi.tag.INJECTIVE,
        )

    return [part(i) for i in range(count)]
