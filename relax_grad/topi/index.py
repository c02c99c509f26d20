"""Tensor expressions of take, gather_elements and their gradients.

An out-of-bounds index never becomes an address: :func:`position` returns for every mode the element
that an index selects, and whether it exists.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx, topi
from tvm.script.ir_builder import tirx as T

from ..ir.dtypes import accumulation_dtype
from ._loops import Chunks, add, extern, loops, once
from ._scatter import Elements, scatter
from .position import filling, position
from .util import Shape, analyzer_of_extents, cast


def take(
    x: te.Tensor, indices: te.Tensor | tirx.PrimExpr, axis: int | None, mode: str, fill: str
) -> te.Tensor:
    """Take elements along an axis: ``topi.take`` without reads outside the axis.

    Parameters
    ----------
    x : te.Tensor
        The data.
    indices : te.Tensor or PrimExpr
        Indices of any rank, with any values; a scalar counts as rank 0.
    axis : int or None
        The axis; None, for data of rank 1, is its only one.
    mode : str
        The treatment of out-of-range indices, see :func:`position`.
    fill : str
        The value for an out-of-bounds index: ``"nan"`` (0 for integers) or ``"zero"``.

    Returns
    -------
    result : te.Tensor
        The indexed axis is replaced by the axes of the indices.
    """
    axis = 0 if axis is None else axis % len(x.shape)
    index_shape = _index_shape(indices)
    before, behind = axis, axis + len(index_shape)

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        where, inside = position(_index_at(indices, at[before:behind]), x.shape[axis], mode)
        return tirx.if_then_else(
            inside, x(*at[:before], where, *at[behind:]), filling(x.dtype, fill)
        )

    return te.compute(
        [*x.shape[:axis], *index_shape, *x.shape[axis + 1 :]],
        element,
        name="take",
        tag=topi.tag.INJECTIVE,
    )


def take_backward(
    output_grad: te.Tensor,
    indices: te.Tensor | tirx.PrimExpr,
    x_shape: Shape,
    axis: int | None,
    mode: str,
) -> te.Tensor:
    """Gradient of take with respect to its data: ``dx[.., i, ..]`` sums the gradients of its
    copies.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    indices, axis, mode
        As in :func:`take`; an out-of-bounds index contributes nothing.
    x_shape : Sequence[int or PrimExpr]
        The shape of the data.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``x_shape`` in the dtype of ``output_grad``; sums of half precision are
        accumulated in float32.
    """
    axis = 0 if axis is None else axis % len(x_shape)
    if not _index_shape(indices):
        return _take_one_backward(output_grad, indices, x_shape, axis, mode)
    dtype = accumulation_dtype(output_grad.dtype)
    before, extent, behind = x_shape[:axis], x_shape[axis], x_shape[axis + 1 :]
    chunks = Chunks(behind, [extent], before)

    def body(grad: tirx.Buffer, index: tirx.Buffer, out: tirx.Buffer) -> None:
        with chunks.tasks() as (outer, chunk):
            with chunks.own(chunk) as at:
                T.buffer_store(out, tirx.const(0, dtype), [*outer, *at])
            with loops(index.shape) as at_index:
                where, inside = position(once(index[tuple(at_index)]), extent, mode)
                where = once(where)
                with (
                    chunks.if_owned(chunk, [where]),
                    T.If(inside),
                    T.Then(),
                    chunks.loops(chunk) as at,
                ):
                    add(out, [*outer, where, *at], grad[(*outer, *at_index, *at)].astype(dtype))

    result = extern(body, [output_grad, indices], x_shape, dtype, "take_backward")
    return cast(result, output_grad.dtype)


def gather_elements(data: te.Tensor, indices: te.Tensor, axis: int, fill: str) -> te.Tensor:
    """Gather along an axis, one index for each result: ``topi.gather`` without reads outside the
    data.

    Parameters
    ----------
    data : te.Tensor
        The data.
    indices : te.Tensor
        Indices, of the rank of the data, with any values; negative ones count from the end.
    axis : int
        The axis.
    fill : str
        The value for an out-of-bounds index: ``"nan"`` (0 for integers) or ``"zero"``.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape of the indices.
    """
    axis %= len(data.shape)
    analyzer = analyzer_of_extents([*data.shape, *indices.shape])
    # ONNX requires the same extent along the other axes, and PyTorch no larger one. With a larger
    # extent, this must not read out of bounds.
    too_long = [
        i
        for i, (size, wanted) in enumerate(zip(data.shape, indices.shape, strict=True))
        if i != axis and not analyzer.can_prove(wanted <= size)
    ]

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        where, inside = position(indices(*at), data.shape[axis], "fast")
        inside = tirx.all(inside, *(at[i] < data.shape[i] for i in too_long))
        return tirx.if_then_else(
            inside, data(*at[:axis], where, *at[axis + 1 :]), filling(data.dtype, fill)
        )

    return te.compute(indices.shape, element, name="gather_elements", tag=topi.tag.INJECTIVE)


def gather_elements_backward_data(
    output_grad: te.Tensor, indices: te.Tensor, data_shape: Shape, axis: int
) -> te.Tensor:
    """Gradient of gather_elements with respect to its data.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result, of the shape of the indices.
    indices, axis
        As in :func:`gather_elements`; an out-of-bounds index contributes nothing.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``; sums of half precision are
        accumulated in float32.
    """
    places = Elements(data_shape, indices.shape, axis)
    return scatter(None, [indices], output_grad, places, "add")


def _take_one_backward(
    output_grad: te.Tensor, index: te.Tensor | tirx.PrimExpr, x_shape: Shape, axis: int, mode: str
) -> te.Tensor:
    """Gradient of take with one index: no sum, as each element of the data selects its own
    gradient."""

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        where, inside = position(_index_at(index, ()), x_shape[axis], mode)
        return tirx.if_then_else(
            tirx.all(inside, at[axis] == where),
            output_grad(*at[:axis], *at[axis + 1 :]),
            tirx.const(0, output_grad.dtype),
        )

    return te.compute(x_shape, element, name="take_backward", tag=topi.tag.INJECTIVE)


def _index_shape(indices: te.Tensor | tirx.PrimExpr) -> list[tirx.PrimExpr]:
    return list(indices.shape) if isinstance(indices, te.Tensor) else []


def _index_at(indices: te.Tensor | tirx.PrimExpr, at: Sequence) -> tirx.PrimExpr:
    return indices(*at) if isinstance(indices, te.Tensor) else indices
