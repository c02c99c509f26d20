"""Tensor expressions that the gradients of the normalisations need.

The data is normalized to ``z = (x - mean) * rstd``, which is recomputed wherever it is read. So
only the result is written as a tensor of the size of the data. ``mean`` may be None, for 0, and
``gamma`` for 1. Everything is computed in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import te, tirx, topi

from ..ir.dtypes import accumulation_dtype
from .util import Shape, cast, count_along, fill_where_empty, is_empty, zeros

Index = Sequence["tirx.PrimExpr"]


def channel_norm_backward_data(
    output_grad: te.Tensor,
    data: te.Tensor,
    gamma: te.Tensor | None,
    mean: te.Tensor,
    rstd: te.Tensor,
    mean_grad: te.Tensor,
    variance_grad: te.Tensor,
    channel: int,
    axes: Sequence[int],
) -> te.Tensor:
    """Gradient with respect to the data of a normalization over axes that gamma lacks, given the
    gradients of the statistics.

    Parameters
    ----------
    output_grad, data : te.Tensor
        The gradient with respect to the normalized data, and the data.
    gamma : te.Tensor or None
        The factor of each channel.
    mean, rstd, mean_grad, variance_grad : te.Tensor
        The statistics and the gradients of mean and variance, which keep the axes with extent 1, or
        lack them.
    channel : int
        The axis of the channels, not negative.
    axes : Sequence[int]
        The axes, all non-negative.

    Returns
    -------
    result : te.Tensor
        ``gamma * rstd * dy + (mean_grad + 2 * variance_grad * (x - mean)) / N`` with ``N`` elements
        along the axes; of the shape and the dtype of ``data``.
    """
    if is_empty(data.shape):
        return zeros(data.shape, data.dtype)
    dtype = accumulation_dtype(data.dtype)
    count, at = count_along(data.shape, axes).astype(dtype), _row_of(data, rstd, axes)
    # Where a statistic has its channel.
    place = channel if len(rstd.shape) == len(data.shape) else 0

    def small(value: Callable[[Index], tirx.PrimExpr], name: str) -> te.Tensor:
        """Compute a tensor of the statistics' shape, so that no division remains for each
        element."""
        return te.compute(rstd.shape, lambda *i: value(i), name=f"norm_{name}")

    def factor(i: Index) -> tirx.PrimExpr:
        value = rstd(*i).astype(dtype)
        return value if gamma is None else gamma(i[place]).astype(dtype) * value

    slope = small(factor, "slope")
    shift = small(lambda i: mean_grad(*i).astype(dtype) / count, "shift")
    twist = small(lambda i: tirx.const(2, dtype) * variance_grad(*i).astype(dtype) / count, "twist")

    def element(*i: tirx.PrimExpr) -> tirx.PrimExpr:
        row = at(i)
        centered = data(*i).astype(dtype) - mean(*row).astype(dtype)
        scaled = output_grad(*i).astype(dtype) * slope(*row)
        return (scaled + (shift(*row) + centered * twist(*row))).astype(data.dtype)

    return te.compute(data.shape, element, name="norm_backward_data")


def norm_backward_gamma(
    output_grad: te.Tensor,
    data: te.Tensor,
    mean: te.Tensor | None,
    rstd: te.Tensor,
    axes: Sequence[int],
    kept: Sequence[int] | None,
) -> te.Tensor:
    """Gradient of a normalization with respect to gamma.

    Parameters
    ----------
    output_grad, data, mean, rstd, axes
        As for :func:`channel_norm_backward_data`.
    kept : Sequence[int] or None
        The axes of the result, all non-negative, in their order. With None, the sum is over
        ``axes``, which have extent 1 in the result.

    Returns
    -------
    result : te.Tensor
        The sum of ``dy * z`` over all axes except ``kept``, and 0 over an empty axis; of the dtype
        of ``rstd``.
    """
    shape = data.shape
    if is_empty(shape):
        empty = rstd.shape if kept is None else [shape[axis] for axis in kept]
        return zeros(empty, rstd.dtype)
    dtype, at = accumulation_dtype(data.dtype, rstd.dtype), _row_of(data, rstd, axes)

    def product(i: Index) -> tirx.PrimExpr:
        return output_grad(*i).astype(dtype) * _normalized(data, mean, rstd, i, at(i), dtype=dtype)

    if kept is None:
        summed, total = list(axes), _row_sums(product, shape, axes, "gamma_grad")
    else:
        summed = [axis for axis in range(len(shape)) if axis not in kept]
        total = _sums_for(product, shape, kept, "gamma_grad")
    return cast(fill_where_empty(total, [shape[axis] for axis in summed]), rstd.dtype)


def rms_norm_row_sums(
    output_grad: te.Tensor,
    data: te.Tensor,
    weight: te.Tensor,
    rstd: te.Tensor,
    axes: Sequence[int],
) -> te.Tensor:
    """Compute the sums over the axes that the gradient of a normalization without a mean needs.

    Parameters
    ----------
    output_grad, data, weight, rstd, axes
        As for :func:`row_norm_backward_data`, with ``weight`` for gamma.

    Returns
    -------
    result : te.Tensor
        ``sum(weight * dy * x * rstd)``, where the axes have extent 1; in float32 at least.
    """
    dtype, at = accumulation_dtype(data.dtype), _row_of(data, rstd, axes)
    if is_empty(data.shape):
        return zeros(rstd.shape, dtype)
    return _row_sums(
        lambda i: (
            _scaled(output_grad, weight, i, axes, dtype)
            * _normalized(data, None, rstd, i, at(i), dtype=dtype)
        ),
        data.shape,
        axes,
        "rms_norm_row_sums",
    )


def row_norm_backward_data(
    output_grad: te.Tensor,
    data: te.Tensor,
    gamma: te.Tensor | None,
    mean: te.Tensor | None,
    rstd: te.Tensor,
    axes: Sequence[int],
    row_sums: te.Tensor | None = None,
) -> te.Tensor:
    """Gradient with respect to the data of a normalization over the axes of gamma.

    Parameters
    ----------
    output_grad, data : te.Tensor
        The gradient with respect to the normalized data, and the data.
    gamma : te.Tensor or None
        The factors, with the axes ``axes``, in that order.
    mean, rstd : te.Tensor
        The statistics, in which the axes have extent 1.
    axes : Sequence[int]
        The axes, all non-negative.
    row_sums : te.Tensor, optional
        The result of :func:`rms_norm_row_sums`, for a normalization without a mean. In one function
        with these sums, TVM's GPU schedules would misidentify the two as a matrix-vector product,
        and fail.

    Returns
    -------
    result : te.Tensor
        ``rstd * (g - average(g) - z * average(g * z))`` with ``g = gamma * dy``, of the shape and
        the dtype of ``data``. Without a mean, ``average(g)`` is left out.
    """
    if is_empty(data.shape):
        return zeros(data.shape, data.dtype)
    dtype = accumulation_dtype(data.dtype)
    count, at = count_along(data.shape, axes).astype(dtype), _row_of(data, rstd, axes)

    def g(i: Index) -> tirx.PrimExpr:
        return _scaled(output_grad, gamma, i, axes, dtype)

    def z(i: Index) -> tirx.PrimExpr:
        return _normalized(data, mean, rstd, i, at(i), dtype=dtype)

    shift = None if mean is None else _row_sums(g, data.shape, axes, "layer_norm_shift")
    twist = row_sums
    if twist is None:
        twist = _row_sums(lambda i: g(i) * z(i), data.shape, axes, "layer_norm_twist")

    def element(*i: tirx.PrimExpr) -> tirx.PrimExpr:
        # The averages are not tensors: TVM's GPU schedule supports sums and one element-wise
        # result.
        centered = g(i) if shift is None else g(i) - shift(*at(i)) / count
        projected = centered - z(i) * (twist(*at(i)) / count)
        return (projected * rstd(*at(i)).astype(dtype)).astype(data.dtype)

    name = "layer_norm" if row_sums is None else "rms_norm"
    return te.compute(data.shape, element, name=f"{name}_backward_data")


def divide_by_count(data: te.Tensor, of_shape: Shape, axes: Sequence[int]) -> te.Tensor:
    """Divide by the number of elements that a tensor of the given shape has along the axes.

    Parameters
    ----------
    data : te.Tensor
        The tensor to divide.
    of_shape : Sequence[int or PrimExpr]
        The shape whose elements are counted.
    axes : Sequence[int]
        The axes to count along, all non-negative.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of ``data``. The count is not converted to half
        precision, which overflows above 65504.
    """
    dtype = accumulation_dtype(data.dtype)
    count = count_along(of_shape, axes)
    return te.compute(
        data.shape,
        lambda *i: (data(*i).astype(dtype) / count.astype(dtype)).astype(data.dtype),
        name="divide_by_count",
        tag=topi.tag.ELEMWISE,
    )


def _row_of(data: te.Tensor, statistic: te.Tensor, axes: Sequence[int]) -> Callable[[Index], Index]:
    """Return a function from an element's index to the index of its statistics, which keep the
    axes with extent 1, or lack them."""
    own = range(len(data.shape))
    if len(statistic.shape) == len(own):
        return lambda i: [0 if axis in axes else i[axis] for axis in own]
    return lambda i: [i[axis] for axis in own if axis not in axes]


def _normalized(
    data: te.Tensor, mean: te.Tensor | None, rstd: te.Tensor, i: Index, at: Index, dtype: str
) -> tirx.PrimExpr:
    """Return element ``i`` of the normalized data, with its statistics at the index ``at``."""
    centered = data(*i).astype(dtype)
    if mean is not None:
        centered = centered - mean(*at).astype(dtype)
    return centered * rstd(*at).astype(dtype)


def _scaled(
    output_grad: te.Tensor, gamma: te.Tensor | None, i: Index, axes: Sequence[int], dtype: str
) -> tirx.PrimExpr:
    """Return element ``i`` of ``gamma * dy``, where gamma has the axes, in that order."""
    grad = output_grad(*i).astype(dtype)
    return grad if gamma is None else grad * gamma(*(i[axis] for axis in axes)).astype(dtype)


def _row_sums(
    value: Callable[[Index], tirx.PrimExpr], shape: Shape, axes: Sequence[int], name: str
) -> te.Tensor:
    """Return the sum of ``value(index)`` over the axes, which are kept with extent 1."""
    reduced = {axis: te.reduce_axis((0, shape[axis]), f"k{axis}") for axis in sorted(axes)}

    def total(*row: tirx.PrimExpr) -> tirx.PrimExpr:
        i = [reduced.get(axis, row[axis]) for axis in range(len(shape))]
        return te.sum(value(i), list(reduced.values())) if reduced else value(i)

    kept = [1 if axis in reduced else extent for axis, extent in enumerate(shape)]
    return te.compute(kept, total, name=name)


def _sums_for(
    value: Callable[[Index], tirx.PrimExpr], shape: Shape, kept: Sequence[int], name: str
) -> te.Tensor:
    """Return the sum of ``value(index)`` over all axes except ``kept``, which are in the order
    given."""
    summed = [axis for axis in range(len(shape)) if axis not in kept]
    reduced = [te.reduce_axis((0, shape[axis]), f"k{axis}") for axis in summed]

    def total(*out: tirx.PrimExpr) -> tirx.PrimExpr:
        i = [
            out[kept.index(axis)] if axis in kept else reduced[summed.index(axis)]
            for axis in range(len(shape))
        ]
        return te.sum(value(i), reduced) if reduced else value(i)

    return te.compute([shape[axis] for axis in kept], total, name=name)
