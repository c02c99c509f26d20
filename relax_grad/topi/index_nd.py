"""Tensor expressions of gather_nd, index_tensor and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi

from ._scatter import Points, nd_points, scatter, tensor_points
from .position import filling
from .util import Shape


def gather_nd(data: te.Tensor, indices: te.Tensor, batch_dims: int, fill: str) -> te.Tensor:
    """Gather slices at points: ``topi.gather_nd`` without reads outside the data.

    Parameters
    ----------
    data : te.Tensor
        The data.
    indices : te.Tensor
        Its last axis holds the vectors of indices, with any values; negative ones count from the
        end.
    batch_dims : int
        The number of leading batch axes that the data and the indices share.
    fill : str
        The value for an out-of-bounds index: ``"nan"`` (0 for integers) or ``"zero"``.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``indices.shape[:-1] + data.shape[batch_dims + indices.shape[-1]:]``.
    """
    return _gather(data, [indices], nd_points(data.shape, indices.shape, batch_dims), fill)


def gather_nd_backward_data(
    output_grad: te.Tensor, indices: te.Tensor, data_shape: Shape, batch_dims: int
) -> te.Tensor:
    """Gradient of gather_nd with respect to its data.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    indices, batch_dims
        As in :func:`gather_nd`; an out-of-bounds index contributes nothing.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``; sums of half precision are
        accumulated in float32.
    """
    places = nd_points(data_shape, indices.shape, batch_dims)
    return scatter(None, [indices], output_grad, places, "add")


def index_tensor(data: te.Tensor, indices: Sequence[te.Tensor], fill: str) -> te.Tensor:
    """Index with tensors that are broadcast: ``topi.index_tensor`` without reads outside the data.

    Parameters
    ----------
    data : te.Tensor
        The data.
    indices : Sequence[te.Tensor]
        An index tensor for each of the first axes, with any values; negative ones count from the
        end.
    fill : str
        As in :func:`gather_nd`.

    Returns
    -------
    result : te.Tensor
        A tensor with the axes of the broadcast indices, then the axes of the data that are not
        indexed.
    """
    places = tensor_points(data.shape, [index.shape for index in indices])
    return _gather(data, indices, places, fill)


def index_tensor_backward_data(
    output_grad: te.Tensor, indices: Sequence[te.Tensor], data_shape: Shape
) -> te.Tensor:
    """Gradient of index_tensor with respect to its data; see :func:`gather_nd_backward_data`."""
    places = tensor_points(data_shape, [index.shape for index in indices])
    return scatter(None, indices, output_grad, places, "add")


def _gather(data: te.Tensor, indices: Sequence[te.Tensor], places: Points, fill: str) -> te.Tensor:
    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        where, inside = places.locate(indices, at[: places.point_dims])
        inside = tirx.all(inside, *map(tirx.Not, places.outside(at)))
        value = data(*where, *at[places.point_dims :])
        return tirx.if_then_else(inside, value, filling(data.dtype, fill))

    return te.compute(places.update_shape, element, name="gather", tag=topi.tag.INJECTIVE)
