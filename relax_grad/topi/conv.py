"""Tensor expressions of the gradients of convolution, for any rank, layout and grouping.

With ``y = conv(x, w)`` of stride ``s``, dilation ``d`` and padding ``p`` along a spatial axis, an
output element reads ``x[y * s + k * d - p]`` for each kernel element ``k``. So

- the weight gradient is ``dw[k] = sum over n, y of dy[y] * x[y * s + k * d - p]``,
- the data gradient is ``dx[i] = sum over o, k of dy[(i + p - k * d) / s] * w[k]``, over those ``k``
  for which the division leaves no remainder.

Both first copy the tensor that is read at an offset into a larger one, padded with zeros. So the
sum itself needs no bounds check.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from ..ir.dtypes import accumulation_dtype
from .util import Shape, axes, cast, fill_where_empty, is_static, spatial_names, spread


def conv_backward_data(
    output_grad: te.Tensor,
    weight: te.Tensor,
    data_shape: Shape,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    data_layout: str,
    kernel_layout: str,
    out_layout: str,
    out_dtype: str,
) -> te.Tensor:
    """Gradient of a convolution with respect to its data.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result, in ``out_layout``.
    weight : te.Tensor
        The weight, in ``kernel_layout``; its channel axis ``I`` counts the channels of one group.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data, in ``data_layout``.
    strides, dilation : Sequence[int]
        One for each spatial axis, in the order D, H, W.
    padding : Sequence[int]
        Zeros before each spatial axis, then zeros after each, in the same order; the trailing zeros
        are not used.
    groups : int
        The number of groups.
    data_layout, kernel_layout, out_layout : str
        Permutations of ``N``, ``C`` and the spatial axes, or of ``O``, ``I`` and the spatial axes.
    out_dtype : str
        The dtype of the result.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and dtype ``out_dtype``.
    """
    spatial = spatial_names(data_layout, "NC")
    dtype = accumulation_dtype(output_grad.dtype, weight.dtype, out_dtype)
    kernel = [weight.shape[axis] for axis in axes(kernel_layout, spatial)]
    extents = [data_shape[axis] for axis in axes(data_layout, spatial)]
    out_channels, in_per_group = (weight.shape[axis] for axis in axes(kernel_layout, "OI"))
    out_per_group = out_channels // groups

    spread_grad = spread(
        output_grad,
        axes(out_layout, spatial),
        extents=[e + (k - 1) * d for e, k, d in zip(extents, kernel, dilation, strict=True)],
        origins=[(k - 1) * d - p for k, d, p in zip(kernel, dilation, padding, strict=False)],
        steps=strides,
        dtype=output_grad.dtype,
    )
    out_channel = te.reduce_axis((0, out_per_group), "o")
    taps = [
        te.reduce_axis((0, size), f"k{name.lower()}")
        for name, size in zip(spatial, kernel, strict=True)
    ]

    def partial(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = dict(zip(data_layout, index, strict=True))
        group = at["C"] // in_per_group if groups > 1 else 0
        in_channel = at["C"] % in_per_group if groups > 1 else at["C"]
        grad_at = {"N": at["N"], "C": group * out_per_group + out_channel}
        weight_at = {"O": group * out_per_group + out_channel, "I": in_channel}
        for name, size, step, tap in zip(spatial, kernel, dilation, taps, strict=True):
            # Element (i + p - k * d) / s of output_grad is at i + (K - 1 - k) * d in spread_grad.
            # The taps run backwards: TVM's schedule for reductions on GPUs fails on a decreasing
            # index.
            grad_at[name] = at[name] + tap * step
            weight_at[name] = size - 1 - tap
        return te.sum(
            spread_grad(*(grad_at[name] for name in out_layout)).astype(dtype)
            * weight(*(weight_at[name] for name in kernel_layout)).astype(dtype),
            axis=[out_channel, *taps],
        )

    total = te.compute(data_shape, partial, name="conv_backward_data")
    return cast(fill_where_empty(total, [out_per_group, *kernel]), out_dtype)


def conv_backward_weight(
    output_grad: te.Tensor,
    data: te.Tensor,
    weight_shape: Shape,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    data_layout: str,
    kernel_layout: str,
    out_layout: str,
    out_dtype: str,
    parts: Sequence[int] = (),
) -> te.Tensor:
    """Gradient of a convolution with respect to its weight, or the parts of its sums.

    Parameters
    ----------
    output_grad : te.Tensor
        The gradient with respect to the result, in ``out_layout``.
    data : te.Tensor
        The data, in ``data_layout``.
    weight_shape : Sequence[int or PrimExpr]
        The shape of the weight, in ``kernel_layout``.
    strides, padding, dilation, groups, data_layout, kernel_layout, out_layout, out_dtype
        As in :func:`conv_backward_data`.
    parts : Sequence[int], optional
        The numbers of equal parts into which each sum is divided along the batch and along the
        spatial axes of the result. The sums of the parts have these axes in front, and the dtype in
        which they are added. By default, sums are not divided.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``weight_shape`` and dtype ``out_dtype``, or of shape ``(*parts,
        *weight_shape)``.
    """
    spatial = spatial_names(data_layout, "NC")
    dtype = accumulation_dtype(output_grad.dtype, data.dtype, out_dtype)
    kernel = [weight_shape[axis] for axis in axes(kernel_layout, spatial)]
    outputs = [output_grad.shape[axis] for axis in axes(out_layout, spatial)]
    out_channels, in_per_group = (weight_shape[axis] for axis in axes(kernel_layout, "OI"))
    out_per_group = out_channels // groups

    padded = spread(
        data,
        axes(data_layout, spatial),
        # Up to the last element that a window reads: later data has no effect.
        extents=[
            _at_least_0((o - 1) * s + (k - 1) * d + 1)
            for o, s, k, d in zip(outputs, strides, kernel, dilation, strict=True)
        ],
        origins=padding[: len(spatial)],
        steps=[1] * len(spatial),
        dtype=data.dtype,
    )
    summed = [output_grad.shape[out_layout.index("N")], *outputs]
    sizes = (
        [extent // part for extent, part in zip(summed, parts, strict=True)] if parts else summed
    )
    within = [
        te.reduce_axis((0, size), name.lower())
        for name, size in zip(f"N{spatial}", sizes, strict=True)
    ]

    def partial(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        of_part, of_weight = index[: len(parts)], index[len(parts) :]
        batch, *windows = (
            [part * size + axis for part, size, axis in zip(of_part, sizes, within, strict=True)]
            if parts
            else within
        )
        at = dict(zip(kernel_layout, of_weight, strict=True))
        grad_at = {"N": batch, "C": at["O"]}
        group = at["O"] // out_per_group if groups > 1 else 0
        data_at = {"N": batch, "C": group * in_per_group + at["I"]}
        for name, stride, step, window in zip(spatial, strides, dilation, windows, strict=True):
            grad_at[name] = window
            data_at[name] = window * stride + at[name] * step
        return te.sum(
            output_grad(*(grad_at[name] for name in out_layout)).astype(dtype)
            * padded(*(data_at[name] for name in data_layout)).astype(dtype),
            axis=within,
        )

    total = te.compute([*parts, *weight_shape], partial, name="conv_backward_weight")
    return total if parts else cast(fill_where_empty(total, summed), out_dtype)


def _at_least_0(extent: tirx.PrimExpr) -> tirx.PrimExpr:
    """Clip the negative extent of an axis for an empty output to 0; symbolic extents are
    trusted."""
    return tirx.max(extent, 0) if is_static(extent) else extent
