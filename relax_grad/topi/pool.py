"""Tensor expressions of the gradients of pooling, for any rank and any layout.

Along a spatial axis of stride ``s``, dilation ``d`` and padding ``p``, tap ``t`` of window ``o`` is
at element ``o * s + t * d - p``, which may be outside the data. So element ``i`` is tap ``t`` of
window ``(i + p - t * d) / s`` if that division leaves no remainder. A gradient with respect to the
data is a sum over taps: every element gathers from the windows that contain it, and nothing is
written twice. The gathered tensor is first spread out, so that the sum itself has neither a
division nor a condition.

Attributes along the spatial axes are in the order depth, height, width, whatever the
layout, as in the pooling operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import te, tirx

from ..ir.dtypes import accumulation_dtype
from ..ir.layout import Layout
from ._pool_windows import PoolWindows, spatial_axes
from .util import Shape, cast, is_empty, is_one, is_static, zeros


def max_pool(
    data: te.Tensor,
    out_shape: Shape,
    pool_size: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    layout: str,
) -> te.Tensor:
    """Return the largest element of each window; NaN if it contains one.

    Parameters
    ----------
    data : te.Tensor
        Floating-point data.
    out_shape : Sequence[int or PrimExpr]
        The shape of the result.
    pool_size, strides, padding, dilation, layout
        As in :func:`max_pool_backward`.
    ceil_mode : bool
        Whether the last windows may reach beyond the padding.

    Returns
    -------
    result : te.Tensor
        A tensor of the dtype of ``data``; negative infinity for a window that holds only padding.
    """
    order = Layout.together(layout, layout)[0]
    windows = PoolWindows.of(order, pool_size, strides, padding, dilation)
    extents, dtype = order.extents(data.shape), accumulation_dtype(data.dtype)

    def largest(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        taps = windows.taps()
        element = windows.element(order.logical(index), taps)
        value = data(*order.stored(element)).astype(dtype)
        lowest = tirx.const(float("-inf"), dtype)
        if ceil_mode or any(padding):
            inside = windows.inside(element, extents, ())
            value = tirx.if_then_else(inside, value, lowest)
        return _largest_or_nan(value, axis=taps)

    return cast(te.compute(out_shape, largest, name="max_pool"), str(data.dtype))


def max_pool_backward(
    output_grad: te.Tensor,
    data: te.Tensor,
    pool_size: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    layout: str,
    out_layout: str,
) -> te.Tensor:
    """Gradient of max pooling with respect to its data.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result, in ``out_layout``.
    data : te.Tensor
        The data, in ``layout``.
    pool_size, strides, dilation : Sequence[int]
        One for each spatial axis.
    padding : Sequence[int]
        The padding before each spatial axis, then that after each.
    layout, out_layout : str
        ``N``, ``C`` and the spatial axes in any order; parts of ``N`` and ``C`` may be split off,
        as in ``"NCHW4c"``.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and dtype of ``data``. Each window passes its gradient to one element
        (:func:`_winner`); a window that holds only padding passes it to none.
    """
    data_layout, window_layout = Layout.together(layout, out_layout)
    windows = PoolWindows.of(data_layout, pool_size, strides, padding, dilation)
    winner = _winner(windows, data, output_grad.shape, data_layout, window_layout)
    dtype = accumulation_dtype(output_grad.dtype)
    winners = windows.spread(winner, data.shape, data_layout, window_layout, "int64", -1)
    grads = windows.spread(output_grad, data.shape, data_layout, window_layout, dtype)
    last = math.prod(windows.sizes) - 1
    taps = windows.taps()

    def partial(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = window_layout.stored(windows.spread_index(data_layout.logical(index), taps))
        won = winners(*at) == last - windows.flat(taps)
        return te.sum(tirx.Select(won, grads(*at), tirx.const(0, dtype)), axis=taps)

    return cast(te.compute(data.shape, partial, name="max_pool_backward"), str(data.dtype))


def max_pool_jvp(
    data_tangent: te.Tensor,
    data: te.Tensor,
    out_shape: Shape,
    pool_size: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    layout: str,
    out_layout: str,
) -> te.Tensor:
    """Derivative of max pooling along a direction.

    Parameters
    ----------
    data_tangent : te.Tensor
        The direction, of the shape of the data.
    data : te.Tensor
        The data, in ``layout``.
    out_shape : Sequence[int or PrimExpr]
        The shape of the result, in ``out_layout``.
    pool_size, strides, padding, dilation, layout, out_layout
        As in :func:`max_pool_backward`.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``out_shape`` and the dtype of ``data_tangent``: the tangent of the
        element that gets a window's gradient in :func:`max_pool_backward`; 0 if there is none.
    """
    data_layout, window_layout = Layout.together(layout, out_layout)
    windows = PoolWindows.of(data_layout, pool_size, strides, padding, dilation)
    winner = _winner(windows, data, out_shape, data_layout, window_layout)

    def tangent(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        taps = windows.unflat(winner(*index))
        element = windows.element(window_layout.logical(index), taps)
        # The winner is an element of the data, so only a window without a winner needs a guard.
        value = data_tangent(*data_layout.stored(element))
        return tirx.if_then_else(winner(*index) >= 0, value, tirx.const(0, data_tangent.dtype))

    return te.compute(out_shape, tangent, name="max_pool_jvp")


def avg_pool_backward(
    output_grad: te.Tensor,
    data_shape: Shape,
    pool_size: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    count_include_pad: bool,
    layout: str,
    out_layout: str,
    out_dtype: str,
) -> te.Tensor:
    """Gradient of average pooling with respect to its data.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result, in ``out_layout``.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data, in ``layout``.
    count_include_pad : bool
        Whether the divisor of a window counts its elements in the data and in the padding, or only
        those in the data. Elements that ``ceil_mode`` adds beyond the padding never count.
    out_dtype : str
        The dtype of the result.
    pool_size, strides, padding, dilation, layout, out_layout
        As in :func:`max_pool_backward`.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and dtype ``out_dtype``.
    """
    data_layout, window_layout = Layout.together(layout, out_layout)
    windows = PoolWindows.of(data_layout, pool_size, strides, padding, dilation)
    extents = data_layout.extents(data_shape)
    dtype = accumulation_dtype(output_grad.dtype, out_dtype)

    def share(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        window = window_layout.logical(index)
        return output_grad(*index).astype(dtype) / windows.count(
            window, extents, count_include_pad
        ).astype(dtype)

    shares = windows.spread(
        te.compute(output_grad.shape, share, name="avg_pool_share"),
        data_shape,
        data_layout,
        window_layout,
        dtype,
    )
    taps = windows.taps()

    def partial(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = windows.spread_index(data_layout.logical(index), taps)
        return te.sum(shares(*window_layout.stored(at)), axis=taps)

    return cast(te.compute(data_shape, partial, name="avg_pool_backward"), out_dtype)


def adaptive_avg_pool_backward(
    output_grad: te.Tensor, data_shape: Shape, layout: str, out_layout: str, out_dtype: str
) -> te.Tensor:
    """Gradient of adaptive average pooling with respect to its data.

    Along an axis of ``H`` elements, window ``o`` of ``O`` holds the elements from
    ``floor(o * H / O)`` up to ``ceil((o + 1) * H / O)``. So element ``i`` belongs to the windows
    from ``floor(i * O / H)`` up to ``ceil((i + 1) * O / H)``: these are adaptive windows too, with
    the roles exchanged.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result, in ``out_layout``.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data, in ``layout``.
    layout, out_layout : str
        ``N``, ``C`` and the spatial axes in any order; parts of ``N`` and ``C`` may be split off,
        as in ``"NCHW4c"``.
    out_dtype : str
        The dtype of the result.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and dtype ``out_dtype``.
    """
    if is_empty(data_shape) or is_empty(output_grad.shape):
        return zeros(data_shape, out_dtype)
    data_layout, window_layout = Layout.together(layout, out_layout)
    names = spatial_axes(data_layout)
    extents = [data_shape[axis] for axis in data_layout.positions(names)]
    outputs = [output_grad.shape[axis] for axis in window_layout.positions(names)]
    dtype = accumulation_dtype(output_grad.dtype, out_dtype)

    def share(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        window = window_layout.logical(index)
        count = tirx.const(1, dtype)
        for name, extent, output in zip(names, extents, outputs, strict=True):
            first, end = _adaptive_window(window[name], output, extent)
            count *= (end - first).astype(dtype)
        return output_grad(*index).astype(dtype) / count

    shares = te.compute(output_grad.shape, share, name="adaptive_avg_pool_share")
    taps = [
        te.reduce_axis((0, _most_windows(extent, output)), f"k{name.lower()}")
        for name, extent, output in zip(names, extents, outputs, strict=True)
    ]

    def partial(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = data_layout.logical(index)
        inside = []
        for name, extent, output, tap in zip(names, extents, outputs, taps, strict=True):
            first, end = _adaptive_window(at[name], extent, output)
            at[name] = first + tap
            inside.append(at[name] < end)
        value = shares(*window_layout.stored(at))
        return te.sum(tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, dtype)), axis=taps)

    return cast(te.compute(data_shape, partial, name="adaptive_avg_pool_backward"), out_dtype)


def _adaptive_window(at: tirx.PrimExpr, number: tirx.PrimExpr, over: tirx.PrimExpr) -> tuple:
    """Return begin and end of one of ``number`` adaptive windows over ``over`` elements."""
    # For a symbolic extent, the simplifier would divide by 0 in the general formula of these two
    # cases.
    if is_one(number):
        return tirx.const(0, "int64"), over
    if is_one(over):
        return tirx.const(0, "int64"), tirx.const(1, "int64")
    return tirx.floordiv(at * over, number), tirx.floordiv((at + 1) * over + number - 1, number)


def _most_windows(extent: tirx.PrimExpr, output: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an upper bound on the number of adaptive windows that contain an element; at least
    1."""
    if is_static(extent) and is_static(output):
        extent, output = int(extent), int(output)
        if extent % output == 0:
            return 1  # windows of a whole number of elements do not overlap
        return output // extent if output % extent == 0 else output // extent + 2
    if is_one(output):
        return 1
    # An empty axis gathers no element, but the loop's extent is still computed.
    return tirx.floordiv(output - 1, tirx.max(extent, 1)) + 2


def _winner(
    windows: PoolWindows, data: te.Tensor, out_shape: Shape, layout: Layout, out_layout: Layout
) -> te.Tensor:
    """Return for each window the position in it of its largest element, or -1.

    Of equal elements the first wins. A NaN wins over any number, and the last of several NaNs wins.
    Padding never wins. PyTorch's CPU kernel chooses the same element: it loops over a window and
    moves on if ``value > largest or isnan(value)``. A window that holds only padding has -1.

    One reduction computes the largest number of a window and a second one its position. Two
    reductions of one value each compile many times faster than one of a pair, and no schedule can
    change their results.
    """
    dtype = accumulation_dtype(data.dtype)
    lowest = tirx.const(float("-inf"), dtype)
    extents = layout.extents(data.shape)
    filled_up = out_layout.filled_up(extents)
    number = math.prod(windows.sizes)

    def read(
        index: Sequence[tirx.PrimExpr], taps: Sequence[tirx.PrimExpr]
    ) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
        element = windows.element(out_layout.logical(index), taps)
        value = data(*layout.stored(element)).astype(dtype)
        return windows.inside(element, extents, filled_up), value

    def largest_number(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        taps = windows.taps()
        inside, value = read(index, taps)
        candidate = tirx.Select(tirx.isnan(value), lowest, value)
        return _largest(tirx.if_then_else(inside, candidate, lowest), axis=taps)

    largest = te.compute(out_shape, largest_number, name="max_pool_largest")

    def highest_rank(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        # The rank of a NaN is number + position, so that the last one wins. The rank of another
        # largest element is number - 1 - position, so that the first one wins.
        taps = windows.taps()
        inside, value = read(index, taps)
        # int64 is Relax's index dtype: te promotes only some integers of a narrower dtype to it.
        position = windows.flat(taps).astype("int64")
        none = tirx.const(-1, "int64")
        rank = tirx.Select(
            tirx.isnan(value),
            number + position,
            tirx.Select(value == largest(*index), number - 1 - position, none),
        )
        return te.max(tirx.if_then_else(inside, rank, none), axis=taps)

    rank = te.compute(out_shape, highest_rank, name="max_pool_rank")
    return te.compute(
        out_shape,
        lambda *i: tirx.Select(
            rank(*i) >= number,
            rank(*i) - number,
            tirx.Select(rank(*i) >= 0, number - 1 - rank(*i), tirx.const(-1, "int64")),
        ),
        name="max_pool_winner",
    )


#: A maximum that starts at negative infinity; ``te.max`` starts at the least finite number, which
#: is greater.
_largest = te.comm_reducer(
    lambda x, y: tirx.max(x, y),
    lambda dtype: tirx.const(float("-inf"), dtype),
    name="largest",
)

#: The same, but NaN stays.
_largest_or_nan = te.comm_reducer(
    lambda x, y: tirx.Select(tirx.any(x > y, tirx.isnan(x)), x, y),
    lambda dtype: tirx.const(float("-inf"), dtype),
    name="largest_or_nan",
)
