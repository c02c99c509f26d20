"""Tensor expressions of the operators that write at indices, and of their gradients.

Updates with equal indices are written in row-major order, as in TVM's loops on a CPU. The last one
wins for the reduction ``update``; for ``mean`` each update halves the previous value. The
reductions ``update``, ``add``, ``mul`` and ``mean`` are recurrences
``state = factor * state + term`` over the updates of an element. So their gradients are recurrences
over the same updates in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi

from ._scatter import Elements, Places, nd_points, scan, scatter, tensor_points
from .position import as_int64
from .util import Shape, broadcast_index

#: The factor of the state, for each reduction that adds a multiple of the update.
_FACTORS = {"update": 0.0, "mean": 0.5}

#: The factor of an update before it is added.
_WEIGHTS = {"update": 1.0, "mean": 0.5}


def scatter_elements(
    data: te.Tensor, indices: te.Tensor, updates: te.Tensor, axis: int, reduction: str
) -> te.Tensor:
    """Scatter along an axis: ``topi.scatter_elements`` without writes outside the data.

    Parameters
    ----------
    data : te.Tensor
        The tensor to update.
    indices : te.Tensor
        Indices, of the rank of the data, with any values; negative ones count from the end.
    updates : te.Tensor
        The values to write, of the shape of the indices.
    axis : int
        The axis.
    reduction : str
        ``"update"``, ``"add"``, ``"mul"``, ``"mean"``, ``"min"`` or ``"max"``.

    Returns
    -------
    result : te.Tensor
        A tensor of the type of the data; half precision is accumulated in float32.
    """
    return scatter(data, [indices], updates, Elements(data.shape, indices.shape, axis), reduction)


def scatter_nd(
    data: te.Tensor, indices: te.Tensor, updates: te.Tensor, reduction: str
) -> te.Tensor:
    """Scatter slices at points, which the last axis of the indices holds; see
    :func:`scatter_elements`."""
    return scatter(data, [indices], updates, nd_points(data.shape, indices.shape), reduction)


def index_put(
    data: te.Tensor, indices: Sequence[te.Tensor], values: te.Tensor, accumulate: bool
) -> te.Tensor:
    """Put values at indices given by broadcast index tensors, one for each axis of the data.

    Parameters
    ----------
    data : te.Tensor
        The tensor to update.
    indices : Sequence[te.Tensor]
        Indices with any values; negative ones count from the end.
    values : te.Tensor
        The values to write, which are broadcast to the shape of the indices.
    accumulate : bool
        Whether to add the values to the data.

    Returns
    -------
    result : te.Tensor
        A tensor of the type of the data; half precision is accumulated in float32.
    """
    return scatter(
        data,
        indices,
        values,
        tensor_points(data.shape, [index.shape for index in indices]),
        "add" if accumulate else "update",
        element=lambda at: broadcast_index(values.shape, at),
    )


def scatter_elements_backward_updates(
    output_grad: te.Tensor, indices: te.Tensor, axis: int, reduction: str
) -> te.Tensor:
    """Gradient of scatter_elements with respect to the updates, for ``update`` and ``mean``.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    indices, axis
        As in :func:`scatter_elements`.
    reduction : str
        ``"update"``, with 0 for an overwritten update, or ``"mean"``.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape of the indices in the dtype of ``output_grad``; 0 where an index means
        no element.
    """
    places = Elements(output_grad.shape, indices.shape, axis)
    return _backward_updates(output_grad, [indices], places, reduction)


def scatter_nd_backward_updates(output_grad: te.Tensor, indices: te.Tensor) -> te.Tensor:
    """Gradient of scatter_nd with respect to the updates, for the reduction ``update``."""
    places = nd_points(output_grad.shape, indices.shape)
    return _backward_updates(output_grad, [indices], places, "update")


def index_put_backward_values(output_grad: te.Tensor, indices: Sequence[te.Tensor]) -> te.Tensor:
    """Gradient of index_put without accumulation with respect to values of the shape of the
    indices."""
    places = tensor_points(output_grad.shape, [index.shape for index in indices])
    return _backward_updates(output_grad, indices, places, "update")


def scatter_elements_scan(
    start: te.Tensor,
    indices: te.Tensor,
    factors: te.Tensor,
    terms: te.Tensor | None,
    axis: int,
    reverse: bool,
) -> te.Tensor:
    """Recurrence over the updates of scatter_elements: :func:`._scatter.scan`."""
    places = Elements(start.shape, indices.shape, axis)
    return scan(start, [indices], factors, terms, places, reverse=reverse)


def scatter_nd_scan(
    start: te.Tensor,
    indices: te.Tensor,
    factors: te.Tensor,
    terms: te.Tensor | None,
    reverse: bool,
) -> te.Tensor:
    """Recurrence over the updates of scatter_nd: :func:`._scatter.scan`."""
    places = nd_points(start.shape, indices.shape)
    return scan(start, [indices], factors, terms, places, reverse=reverse)


def slice_scatter(
    data: te.Tensor,
    src: te.Tensor,
    start: int | tirx.PrimExpr,
    step: int | tirx.PrimExpr,
    axis: int,
) -> te.Tensor:
    """Write ``src[k]`` to ``data[start + k * step]`` along an axis.

    Parameters
    ----------
    data : te.Tensor
        The tensor to update.
    src : te.Tensor
        The values to write; values before or after the axis are not written.
    start : int or PrimExpr
        The first position; a negative one lies before the axis.
    step : int or PrimExpr
        The step, 1 or more.
    axis : int
        The axis.

    Returns
    -------
    result : te.Tensor
        A tensor of the type of the data.
    """
    axis %= len(data.shape)
    start, step = as_int64(start), as_int64(step)

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        offset = as_int64(at[axis]) - start
        k = tirx.floordiv(offset, step)
        written = tirx.all(offset >= 0, tirx.floormod(offset, step) == 0, k < src.shape[axis])
        return tirx.if_then_else(written, src(*at[:axis], k, *at[axis + 1 :]), data(*at))

    return te.compute(data.shape, element, name="slice_scatter", tag=topi.tag.INJECTIVE)


def slice_scatter_backward_src(
    output_grad: te.Tensor,
    src_shape: Shape,
    start: int | tirx.PrimExpr,
    step: int | tirx.PrimExpr,
    axis: int,
) -> te.Tensor:
    """Gradient of slice_scatter with respect to its source.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    src_shape : Sequence[int or PrimExpr]
        The shape of the source.
    start, step, axis
        As in :func:`slice_scatter`.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``src_shape`` in the dtype of ``output_grad``; 0 for elements that were
        not written.
    """
    axis %= len(src_shape)
    start, step = as_int64(start), as_int64(step)

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        where = start + as_int64(at[axis]) * step
        inside = tirx.all(where >= 0, where < output_grad.shape[axis])
        value = output_grad(*at[:axis], where, *at[axis + 1 :])
        return tirx.if_then_else(inside, value, tirx.const(0, output_grad.dtype))

    return te.compute(src_shape, element, name="slice_scatter_backward", tag=topi.tag.INJECTIVE)


def _backward_updates(
    output_grad: te.Tensor, indices: Sequence[te.Tensor], places: Places, reduction: str
) -> te.Tensor:
    """Run the updates in reverse: each takes its share of the gradient at its element.

    The forward operator multiplies the update with its weight, so this multiplies the gradient with
    it too.
    """
    states = scan(output_grad, indices, _FACTORS[reduction], None, places, reverse=True)
    weight = _WEIGHTS[reduction]
    if weight == 1:
        return states
    return te.compute(
        states.shape,
        lambda *at: states(*at) * tirx.const(weight, states.dtype),
        name="share",
        tag=topi.tag.INJECTIVE,
    )
