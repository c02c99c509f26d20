"""Tensor expressions of the operators that permute elements, and of their gradients."""

from __future__ import annotations

from tvm import te, tirx, topi
from tvm.tirx import IndexMap

from .util import Shape


def reverse_sequence(
    data: te.Tensor, seq_lengths: te.Tensor, seq_axis: int, batch_axis: int
) -> te.Tensor:
    """Reverse the first elements of each sequence like ``topi.reverse_sequence``, for symbolic
    batches too.

    Parameters
    ----------
    data : te.Tensor
        The data.
    seq_lengths : te.Tensor
        The number of elements to reverse of each sequence. If it exceeds the extent, all elements
        are reversed; if it is negative, none.
    seq_axis, batch_axis : int
        The axis of the elements of a sequence, and the axis of the sequences.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of ``data``.
    """
    extent = data.shape[seq_axis]

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = list(index)
        place = at[seq_axis]
        length = tirx.min(seq_lengths(index[batch_axis]).astype("int64"), extent)
        at[seq_axis] = tirx.if_then_else(place < length, length - 1 - place, place)
        return data(*at)

    return te.compute(data.shape, element, name="reverse_sequence", tag=topi.tag.INJECTIVE)


def layout_transform_backward_x(
    output_grad: te.Tensor, x_shape: Shape, index_map: IndexMap
) -> te.Tensor:
    """Gradient of layout_transform: each element of the data reads the gradient at its new
    position.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``layout_transform(x, index_map)``.
    x_shape : Sequence[int or PrimExpr]
        The shape of the data.
    index_map : IndexMap
        The map from the old to the new index of an element.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``x_shape`` and the dtype of ``output_grad``.
    """
    return te.compute(
        x_shape,
        lambda *index: output_grad(*index_map.map_indices(list(index))),
        name="layout_transform_backward",
        tag=topi.tag.INJECTIVE,
    )


def pixel_shuffle(data: te.Tensor, upscale_factor: int) -> te.Tensor:
    """Move channels into space: ``[.., C * r * r, H, W]`` becomes ``[.., C, H * r, W * r]``.

    Parameters
    ----------
    data : te.Tensor
        The data.
    upscale_factor : int
        The factor r.

    Returns
    -------
    result : te.Tensor
        A tensor of the dtype of ``data``.
    """
    r = upscale_factor
    *batch, channels, height, width = data.shape

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        *outer, c, h, w = index
        return data(*outer, (c * r + h % r) * r + w % r, h // r, w // r)

    shape = [*batch, channels // (r * r), height * r, width * r]
    return te.compute(shape, element, name="pixel_shuffle", tag=topi.tag.INJECTIVE)


def pixel_shuffle_backward_data(
    output_grad: te.Tensor, data_shape: Shape, upscale_factor: int
) -> te.Tensor:
    """Gradient of pixel_shuffle with respect to its data: the inverse permutation.

    If the number of channels is not divisible, as is possible for a symbolic one, the gradient of
    the dropped channels is 0.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``pixel_shuffle(data, upscale_factor)``.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.
    upscale_factor : int
        The factor r.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``.
    """
    r = upscale_factor

    *_, channels, _, _ = data_shape
    is_whole = isinstance(channels, (int, tirx.IntImm))

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        *outer, c, h, w = index
        place = [*outer, c // (r * r), h * r + c // r % r, w * r + c % r]
        if is_whole:
            return output_grad(*place)
        zero = tirx.const(0, output_grad.dtype)
        return tirx.if_then_else(place[-3] < output_grad.shape[-3], output_grad(*place), zero)

    return te.compute(data_shape, element, name="pixel_shuffle_backward", tag=topi.tag.INJECTIVE)
