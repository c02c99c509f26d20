"""Tensor expressions of affine_grid and of its gradient."""

from __future__ import annotations

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .util import Shape, cast, fill_where_empty, is_empty, is_static, zeros


def affine_grid(data: te.Tensor, size: Shape, align_corners: bool) -> te.Tensor:
    """Transform a regular grid: ``topi.image.affine_grid`` for extents of any value, also symbolic.

    Parameters
    ----------
    data : te.Tensor
        The affine matrices, of shape ``(batch, n, n + 1)`` for ``n`` dimensions.
    size : Sequence[int or PrimExpr]
        The spatial extents of the grid.
    align_corners : bool
        Whether the first and the last element of an axis are at -1 and 1, or their outer borders
        are. An axis of one element is at 0 in either case.

    Returns
    -------
    result : te.Tensor
        The grid, of shape ``(batch, n, *size)``; half precision is computed in float32.
    """
    dtype = accumulation_dtype(data.dtype)
    ndim = len(size)

    def element(n: tirx.PrimExpr, row: tirx.PrimExpr, *at: tirx.PrimExpr) -> tirx.PrimExpr:
        total = data(n, row, ndim).astype(dtype)
        for axis, i in enumerate(at):
            column = ndim - 1 - axis
            total += data(n, row, column).astype(dtype) * _regular(
                i, size[axis], align_corners, dtype
            )
        return total.astype(data.dtype)

    return te.compute(
        [data.shape[0], ndim, *size], element, name="affine_grid", tag=topi.tag.INJECTIVE
    )


def affine_grid_backward_data(output_grad: te.Tensor, align_corners: bool) -> te.Tensor:
    """Gradient of affine_grid with respect to its matrices.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    align_corners : bool
        As for :func:`affine_grid`.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape of the matrices in the dtype of ``output_grad``; half precision is
        accumulated in float32.
    """
    batch, ndim, *size = output_grad.shape
    shape = [batch, ndim, len(size) + 1]
    if is_empty(size):
        return zeros(shape, output_grad.dtype)
    dtype = accumulation_dtype(output_grad.dtype)
    at = [te.reduce_axis((0, extent), f"k{axis}") for axis, extent in enumerate(size)]

    def element(n: tirx.PrimExpr, row: tirx.PrimExpr, column: tirx.PrimExpr) -> tirx.PrimExpr:
        factor = tirx.const(1, dtype)
        for axis, (i, extent) in enumerate(zip(at, size, strict=True)):
            place = _regular(i, extent, align_corners, dtype)
            factor = tirx.Select(column == len(size) - 1 - axis, place, factor)
        return te.sum(output_grad(n, row, *at).astype(dtype) * factor, axis=at)

    total = te.compute(shape, element, name="affine_grid_backward")
    return cast(fill_where_empty(total, size), output_grad.dtype)


def _regular(
    i: tirx.PrimExpr, extent: int | tirx.PrimExpr, align_corners: bool, dtype: str
) -> tirx.PrimExpr:
    """Return the coordinate in [-1, 1] of element ``i`` of an axis, as in
    ``topi.image.affine_grid``."""

    def const(value: float) -> tirx.PrimExpr:
        return tirx.const(value, dtype)

    at, size = i.astype(dtype), tirx.const(1, "int64") * extent
    if align_corners:
        if is_static(extent) and int(extent) == 1:
            return const(0)
        place = const(-1) + at * (const(2 - 1e-7) / (size - 1).astype(dtype))
        return place if is_static(extent) else tirx.if_then_else(size > 1, place, const(0))
    size = size.astype(dtype)
    return const(-1) + const(1) / size + at * (const(2) / size)
