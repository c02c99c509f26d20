"""Tensor expressions of strided slices and their gradients.

A slice reads ``y[k] = x[begin + k * stride]`` along an axis. So element ``i`` of the data is in the
slice if ``i - begin`` is a multiple of the stride and ``k = (i - begin) / stride`` is less than the
number of elements in the slice. Each element of the gradient computes its own ``k``. Of ``end``,
only the extent of the output is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import te, tirx, topi

from .position import as_int64, filling
from .util import Shape

#: A constant stride up to this one cannot overflow where it is added to an index.
_SAFE_STRIDE = 2**31

#: A number greater than any extent.
_FAR = 2**48


def strided_slice_backward_data(
    output_grad: te.Tensor,
    data_shape: Shape,
    axes: Sequence[int],
    begin: Sequence[tirx.PrimExpr],
    strides: Sequence[tirx.PrimExpr],
    assume_inbound: bool,
) -> te.Tensor:
    """Gradient of strided_slice with respect to its data.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.
    axes : Sequence[int]
        The axes that are sliced; a negative one counts from the last.
    begin, strides : Sequence[PrimExpr]
        One value for each of the axes.
    assume_inbound : bool
        Whether ``begin`` is used without clipping. ``topi.strided_slice`` only does so if a value
        is symbolic; if everything is constant, it clips in either case.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``.
    """
    ndim = len(data_shape)
    static = all(isinstance(value, (int, tirx.IntImm)) for value in (*data_shape, *begin, *strides))
    starts = {}
    for axis, first, stride in zip(axes, begin, strides, strict=True):
        axis %= ndim
        if static or not assume_inbound:
            first = canonical_index(first, data_shape[axis], stride)
        starts[axis] = (first, stride)
    return _slice_backward(output_grad, data_shape, starts, "strided_slice_backward_data")


def strided_slice(
    x: te.Tensor,
    output_shape: Shape,
    axes: Sequence[int],
    begin: Sequence[tirx.PrimExpr],
    strides: Sequence[tirx.PrimExpr],
) -> te.Tensor:
    """Compute a strided slice of data with symbolic extents, with ``begin`` clipped to the data.

    Parameters
    ----------
    x : te.Tensor
        The data.
    output_shape : Sequence[PrimExpr]
        The shape of the result, which determines the end of the slice.
    axes, begin, strides
        As in :func:`strided_slice_backward_data`.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``output_shape``.
    """
    starts = {
        axis % len(x.shape): (
            canonical_index(first, x.shape[axis], stride),
            _bounded_stride(stride, x.shape[axis]),
        )
        for axis, first, stride in zip(axes, begin, strides, strict=True)
    }

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        place = list(at)
        for axis, (first, stride) in starts.items():
            place[axis] = first + at[axis] * stride
        return x(*place)

    return te.compute(output_shape, element, name="strided_slice", tag=topi.tag.INJECTIVE)


def dynamic_strided_slice(
    x: te.Tensor, begin: te.Tensor, strides: te.Tensor, output_shape: Shape
) -> te.Tensor:
    """Compute a strided slice whose begin and strides are known at run time only.

    Parameters
    ----------
    x : te.Tensor
        The data.
    begin, strides : te.Tensor
        Vectors with one element for each axis, with any values.
    output_shape : Sequence[PrimExpr]
        The shape of the result: :func:`dynamic_strided_slice_shape`.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``output_shape``; NaN (0 for integers) beyond the end of the slice.
    """

    starts = [
        (
            canonical_index(begin(axis), extent, strides(axis)),
            _bounded_stride(strides(axis), extent),
        )
        for axis, extent in enumerate(x.shape)
    ]

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        places = [first + k * stride for k, (first, stride) in zip(at, starts, strict=True)]
        inside = [
            condition
            for place, extent in zip(places, x.shape, strict=True)
            for condition in (place >= 0, place < extent)
        ]
        return tirx.if_then_else(tirx.all(*inside), x(*places), filling(x.dtype, "nan"))

    return te.compute(output_shape, element, name="dynamic_slice", tag=topi.tag.INJECTIVE)


def dynamic_strided_slice_shape(
    x: te.Tensor, begin: te.Tensor, end: te.Tensor, strides: te.Tensor
) -> te.Tensor:
    """Return the shape of a strided slice, a vector of int64.

    An axis is empty if its slice does not advance past its begin in the direction of the stride, or
    if its stride is 0.
    """

    def extent_of(axis: int, extent: tirx.PrimExpr) -> tirx.PrimExpr:
        stride = _bounded_stride(strides(axis), extent)
        span = canonical_index(end(axis), extent, stride) - canonical_index(
            begin(axis), extent, stride
        )
        forward = tirx.if_then_else(stride < 0, -span, span)
        count = tirx.floordiv(forward + tirx.abs(stride) - 1, tirx.max(tirx.abs(stride), 1))
        return tirx.if_then_else(stride == 0, tirx.const(0, "int64"), tirx.max(count, 0))

    def element(i: tirx.PrimExpr) -> tirx.PrimExpr:
        result = tirx.const(0, "int64")
        for axis, extent in enumerate(x.shape):
            result = tirx.if_then_else(i == axis, extent_of(axis, extent), result)
        return result

    return te.compute((len(x.shape),), element, name="dynamic_slice_shape")


def dynamic_strided_slice_backward_data(
    output_grad: te.Tensor, data_shape: Shape, begin: te.Tensor, strides: te.Tensor
) -> te.Tensor:
    """Gradient of dynamic_strided_slice with respect to its data.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data.
    begin, strides : te.Tensor
        Vectors of int64 with one element for each axis, with any values.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` in the dtype of ``output_grad``.
    """

    # Separate stages: TVM 0.26 takes minutes to simplify the nested expressions.
    def stage(name: str, value: tirx.PrimExpr) -> tirx.PrimExpr:
        return te.compute((1,), lambda _: value, name=name)(0)

    starts = {}
    for axis, extent in enumerate(data_shape):
        stride = _bounded_stride(strides(axis), extent)
        starts[axis] = (
            stage(f"begin_{axis}", canonical_index(begin(axis), extent, strides(axis))),
            stage(f"stride_{axis}", stride),
        )
    return _slice_backward(output_grad, data_shape, starts, "dynamic_slice_backward_data")


def canonical_index(
    index: int | tirx.PrimExpr, extent: tirx.PrimExpr, stride: tirx.PrimExpr
) -> tirx.PrimExpr:
    """Return the element at which a slice begins or ends, as in ``topi.strided_slice``.

    A negative index counts from the end; the result is clipped to ``[0, extent]``, or to
    ``[-1, extent - 1]`` for a negative stride.
    """
    index, extent, stride = as_int64(index), as_int64(extent), as_int64(stride)
    if isinstance(index, tirx.IntImm):  # bounded, because TVM would overflow
        index = as_int64(max(-_FAR, min(int(index), _FAR)))
    index = tirx.if_then_else(index < 0, index + extent, index)
    low = tirx.if_then_else(stride < 0, tirx.const(-1, "int64"), tirx.const(0, "int64"))
    return tirx.min(tirx.max(index, low), low + extent)


def _bounded_stride(stride: tirx.PrimExpr, extent: tirx.PrimExpr) -> tirx.PrimExpr:
    """Bound a stride by the extent: a larger stride also selects the first element only, and could
    overflow."""
    stride = as_int64(stride)
    if isinstance(stride, tirx.IntImm) and abs(int(stride)) <= _SAFE_STRIDE:
        return stride
    bound = tirx.max(as_int64(extent), 1)
    return tirx.max(tirx.min(stride, bound), -bound)


def _slice_backward(
    output_grad: te.Tensor,
    data_shape: Shape,
    starts: Mapping[int, tuple[tirx.PrimExpr, tirx.PrimExpr]],
    name: str,
) -> te.Tensor:
    """Look up each element of the data in the slice; ``starts`` maps axes to begin and stride.

    Positions are counted from the lowest element of the slice, which is its last for a negative
    stride: TVM miscompiles an index with a floor division of an expression that decreases in the
    loop variable, such as ``(3 - i) // 2``.
    """

    def element(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        place = list(at)
        inside = []
        for axis, (begin, stride) in starts.items():
            begin, stride = as_int64(begin), _bounded_stride(stride, data_shape[axis])
            last = as_int64(output_grad.shape[axis]) - 1
            falls, step = stride < 0, tirx.max(tirx.abs(stride), 1)
            distance = at[axis] - tirx.if_then_else(falls, begin - last * step, begin)
            count = tirx.floordiv(distance, step)
            inside += [
                stride != 0,
                distance >= 0,
                tirx.floormod(distance, step) == 0,
                count <= last,
            ]
            place[axis] = tirx.if_then_else(falls, last - count, count)
        if not inside:
            return output_grad(*place)
        zero = tirx.const(0, output_grad.dtype)
        return tirx.if_then_else(tirx.all(*inside), output_grad(*place), zero)

    return te.compute(data_shape, element, name=name, tag=topi.tag.INJECTIVE)
