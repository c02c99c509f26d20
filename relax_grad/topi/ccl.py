"""Tensor expressions of a worker's operations on its own part of a tensor."""

from __future__ import annotations

from tvm import te, tirx, topi

from .util import Shape


def part_of_worker(
    data: te.Tensor, worker: tirx.PrimExpr, part_shape: Shape, num_workers: int, axis: int
) -> te.Tensor:
    """Take a worker's part of a tensor that is divided among workers along an axis.

    Parameters
    ----------
    data : te.Tensor
        The whole tensor.
    worker : PrimExpr
        The worker's number. Groups of ``num_workers`` workers each divide the whole among them.
    part_shape : Sequence[int or PrimExpr]
        The shape of a part.
    num_workers : int
        The number of parts.
    axis : int
        The axis.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``part_shape``.
    """

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = list(index)
        at[axis] = worker % num_workers * part_shape[axis] + at[axis]
        return data(*at)

    return te.compute(part_shape, element, name="part_of_worker", tag=topi.tag.INJECTIVE)


def at_part_of_worker(
    part: te.Tensor, worker: tirx.PrimExpr, data_shape: Shape, num_workers: int, axis: int
) -> te.Tensor:
    """Put a worker's part at its position in the whole tensor, and 0 elsewhere.

    Parameters
    ----------
    part : te.Tensor
        The worker's part.
    worker : PrimExpr
        The worker's number. Groups of ``num_workers`` workers each divide the whole among them.
    data_shape : Sequence[int or PrimExpr]
        The shape of the whole tensor.
    num_workers : int
        The number of parts.
    axis : int
        The axis along which the whole tensor is divided.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and the dtype of ``part``.
    """

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = list(index)
        extent = part.shape[axis]
        at[axis] = at[axis] - worker % num_workers * extent
        own = tirx.all(at[axis] >= 0, at[axis] < extent)
        return tirx.if_then_else(own, part(*at), tirx.const(0, part.dtype))

    return te.compute(data_shape, element, name="at_part_of_worker", tag=topi.tag.INJECTIVE)


def on_worker0(data: te.Tensor, worker: tirx.PrimExpr) -> te.Tensor:
    """Return the tensor on worker 0, and 0 on the other workers."""
    return te.compute(
        data.shape,
        lambda *i: tirx.if_then_else(worker == 0, data(*i), tirx.const(0, data.dtype)),
        name="on_worker0",
        tag=topi.tag.ELEMWISE,
    )
