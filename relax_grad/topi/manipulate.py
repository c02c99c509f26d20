"""Tensor expressions of data-movement operators for which TVM's are insufficient, and of their
gradients."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .util import Shape, analyzer_of_extents, cast, fill_where_empty, is_empty, zeros


def tile_backward_data(
    output_grad: te.Tensor, data_shape: Shape, repeats: Sequence[int]
) -> te.Tensor:
    """Gradient of tile with respect to its data: each element sums its copies.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``tile(data, repeats)``.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.
    repeats : Sequence[int]
        The number of copies along each axis of the data, right-aligned: missing ones at the front
        are 1, and excess ones belong to axes that tile has added.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``.
    """
    ndim = len(data_shape)
    repeats = [1] * (ndim - len(repeats)) + list(repeats)
    if 0 in repeats or is_empty(data_shape):
        return zeros(data_shape, output_grad.dtype)
    added = len(repeats) - ndim
    copies = [
        0 if count == 1 else te.reduce_axis((0, count), f"copy{axis}")
        for axis, count in enumerate(repeats)
    ]
    summed = [copy for copy in copies if not isinstance(copy, int)]
    dtype = accumulation_dtype(output_grad.dtype)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        inside = (
            copy * extent + i
            for copy, extent, i in zip(copies[added:], data_shape, index, strict=True)
        )
        value = output_grad(*copies[:added], *inside).astype(dtype)
        return te.sum(value, axis=summed) if summed else value

    return cast(te.compute(data_shape, element, name="tile_backward_data"), output_grad.dtype)


def repeat_backward_data(
    output_grad: te.Tensor, data_shape: Shape, repeats: int, axis: int | None
) -> te.Tensor:
    """Gradient of repeat with respect to its data: each element sums its copies.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result of ``repeat(data, repeats, axis)``.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.
    repeats : int
        The number of copies of each element.
    axis : int or None
        The axis along which elements were repeated; None if repeat flattened the data first.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and the dtype of ``output_grad``.
    """
    if repeats == 0 or is_empty(data_shape):
        return zeros(data_shape, output_grad.dtype)
    dtype = accumulation_dtype(output_grad.dtype)
    copy = te.reduce_axis((0, repeats), "copy")

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        if axis is None:
            at = [_ravel(index, data_shape) * repeats + copy]
        else:
            at = list(index)
            at[axis] = at[axis] * repeats + copy
        return te.sum(output_grad(*at).astype(dtype), axis=copy)

    return cast(te.compute(data_shape, element, name="repeat_backward_data"), output_grad.dtype)


def repeat(data: te.Tensor, out_shape: Shape, repeats: int, axis: int | None) -> te.Tensor:
    """Repeat each element like ``topi.repeat``, for any rank and any number of repeats.

    Parameters
    ----------
    data : te.Tensor
        The data.
    out_shape : Sequence[int or PrimExpr]
        The shape of the result.
    repeats : int
        The number of copies of each element; may be 0.
    axis : int or None
        The axis along which elements are repeated; None to flatten the data first.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``out_shape`` and the dtype of ``data``.
    """
    if is_empty(out_shape):
        return zeros(out_shape, data.dtype)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        if axis is None:
            return data(*_unravel(index[0] // repeats, data.shape))
        at = list(index)
        at[axis] = at[axis] // repeats
        return data(*at)

    return te.compute(out_shape, element, name="repeat", tag=topi.tag.INJECTIVE)


def expand_dims(data: te.Tensor, axes: Sequence[int]) -> te.Tensor:
    """Insert axes of extent 1 at the given positions in the result, which may be negative."""
    ndim = len(data.shape) + len(axes)
    new = {axis % ndim for axis in axes}
    extents = iter(data.shape)
    shape = [1 if axis in new else next(extents) for axis in range(ndim)]
    return te.compute(
        shape,
        lambda *index: data(*(i for axis, i in enumerate(index) if axis not in new)),
        name="expand_dims",
        tag=topi.tag.INJECTIVE,
    )


def collapse_sum(data: te.Tensor, shape: Shape) -> te.Tensor:
    """Sum over the axes along which a tensor of the given shape was broadcast to ``data``.

    Unlike ``topi.collapse_sum``, it accumulates half precision in float32, and returns 0 for a sum
    over an empty axis.

    Parameters
    ----------
    data : te.Tensor
        The tensor to sum.
    shape : Sequence[int or PrimExpr]
        The shape of the result, which must be broadcastable to ``data``.

    Returns
    -------
    result : te.Tensor
        A tensor of the given shape and the dtype of ``data``.

    Raises
    ------
    ValueError
        If the shape is not known to be broadcastable to ``data``.
    """
    added = len(data.shape) - len(shape)
    sources = list(data.shape[max(added, 0) :])
    analyzer = analyzer_of_extents([*data.shape, *shape])
    kept = [
        analyzer.can_prove_equal(source, target)
        for source, target in zip(sources, shape, strict=False)
    ]
    if added < 0 or not all(
        keep or analyzer.can_prove_equal(target, 1)
        for keep, target in zip(kept, shape, strict=True)
    ):
        raise ValueError(
            f"collapse_sum: the shape {list(shape)} must be broadcastable to the data's, "
            f"{list(data.shape)}"
        )
    extents = [*data.shape[:added], *(s for s, keep in zip(sources, kept, strict=True) if not keep)]
    if is_empty(extents):
        return zeros(shape, data.dtype)
    dtype = accumulation_dtype(data.dtype)
    summed = [te.reduce_axis((0, extent), f"k{i}") for i, extent in enumerate(extents)]

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        over = iter(summed[added:])
        at = [i if keep else next(over) for i, keep in zip(index, kept, strict=True)]
        value = data(*summed[:added], *at).astype(dtype)
        return te.sum(value, axis=summed) if summed else value

    total = te.compute(shape, element, name="collapse_sum")
    return cast(fill_where_empty(total, extents), data.dtype)


def _ravel(index: Sequence[tirx.PrimExpr], shape: Shape) -> tirx.PrimExpr:
    """Return the position of an element in a flattened tensor."""
    position = tirx.const(0, "int64")
    for i, extent in zip(index, shape, strict=True):
        position = position * extent + i
    return position


def _unravel(position: tirx.PrimExpr, shape: Shape) -> list[tirx.PrimExpr]:
    """Return the index of an element, given its position in the flattened tensor."""
    index: list[tirx.PrimExpr] = []
    for extent in reversed(shape):
        index.insert(0, position % extent)
        position = position // extent
    return index
