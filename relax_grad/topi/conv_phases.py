"""Tensor expressions of the data gradient of a strided convolution, by the phases of its elements.

With ``y = conv(x, w)`` of stride ``s`` and padding ``p`` along an axis, without dilation, ``dx[i] =
sum over k of dy[(i + p - k) / s] * w[k]``, over those ``k`` for which the division leaves no
remainder. Let the phase ``r`` be the remainder of ``i + p`` and ``q`` its quotient. Then ``k = r +
s * t``, and ``dx[i] = sum over t of dy[q - t] * w[r + s * t]``: for each phase, a convolution of
stride 1 with every ``s``-th element of the kernel.

So the sums have ``ceil(K / s)`` terms along the axis in place of ``K``, of which all but every
``s``-th are products with zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

from ..ir.dtypes import accumulation_dtype
from .util import Shape, axes, spatial_names, spread


def conv_backward_data_by_phases(
    output_grad: te.Tensor,
    weight: te.Tensor,
    data_shape: Shape,
    strides: Sequence[int],
    padding: Sequence[int],
    groups: int,
    data_layout: str,
    kernel_layout: str,
    out_layout: str,
    out_dtype: str,
) -> te.Tensor:
    """Gradient of a convolution without dilation with respect to its data, by phases.

    Parameters
    ----------
    output_grad, weight, strides, groups, data_layout, kernel_layout, out_layout, out_dtype
        As in :func:`relax_grad.topi.conv.conv_backward_data`.
    data_shape : Sequence[int or PrimExpr]
        The shape of the data, whose spatial extents are known.
    padding : Sequence[int]
        The zeros before each spatial axis.

    Returns
    -------
    result : te.Tensor
        The gradients of the phases, in the dtype in which they are added: the phases along each
        spatial axis, and then the axes of ``data_layout``, with a quotient in the place of a
        position. :func:`join_phases` puts them in order.
    """
    spatial = spatial_names(data_layout, "NC")
    dtype = accumulation_dtype(output_grad.dtype, weight.dtype, out_dtype)
    kernel = [int(weight.shape[axis]) for axis in axes(kernel_layout, spatial)]
    extents = [int(data_shape[axis]) for axis in axes(data_layout, spatial)]
    out_channels, in_per_group = (weight.shape[axis] for axis in axes(kernel_layout, "OI"))
    out_per_group = out_channels // groups
    taps = [-(-size // stride) for size, stride in zip(kernel, strides, strict=True)]
    quotients = [
        (extent - 1 + before) // stride - before // stride + 1
        for extent, before, stride in zip(extents, padding, strides, strict=False)
    ]

    near = spread(
        output_grad,
        axes(out_layout, spatial),
        extents=[count + tap - 1 for count, tap in zip(quotients, taps, strict=True)],
        origins=[
            tap - 1 - before // stride
            for tap, before, stride in zip(taps, padding, strides, strict=False)
        ],
        steps=[1] * len(spatial),
        dtype=output_grad.dtype,
    )
    whole = spread(  # the kernel, up to a multiple of the strides
        weight,
        axes(kernel_layout, spatial),
        extents=[tap * stride for tap, stride in zip(taps, strides, strict=True)],
        origins=[0] * len(spatial),
        steps=[1] * len(spatial),
        dtype=weight.dtype,
    )
    out_channel = te.reduce_axis((0, out_per_group), "o")
    within = [
        te.reduce_axis((0, tap), f"k{name.lower()}")
        for name, tap in zip(spatial, taps, strict=True)
    ]

    def partial(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        phases, at = (
            index[: len(spatial)],
            dict(zip(data_layout, index[len(spatial) :], strict=True)),
        )
        group = at["C"] // in_per_group if groups > 1 else 0
        grad_at = {"N": at["N"], "C": group * out_per_group + out_channel}
        in_channel = at["C"] % in_per_group if groups > 1 else at["C"]
        weight_at = {"O": group * out_per_group + out_channel, "I": in_channel}
        for name, phase, stride, tap, axis in zip(
            spatial, phases, strides, taps, within, strict=True
        ):
            # The taps run backwards, as in conv_backward_data.
            grad_at[name] = at[name] + axis
            weight_at[name] = (tap - 1 - axis) * stride + phase
        return te.sum(
            near(*(grad_at[name] for name in out_layout)).astype(dtype)
            * whole(*(weight_at[name] for name in kernel_layout)).astype(dtype),
            axis=[out_channel, *within],
        )

    counts = dict(zip(spatial, quotients, strict=True))
    shape = [counts.get(name, data_shape[axis]) for axis, name in enumerate(data_layout)]
    phases = [min(size, stride) for size, stride in zip(kernel, strides, strict=True)]
    return te.compute([*phases, *shape], partial, name="conv_backward_data_by_phases")


def join_phases(
    phases: te.Tensor,
    data_shape: Shape,
    strides: Sequence[int],
    padding: Sequence[int],
    data_layout: str,
    out_dtype: str,
) -> te.Tensor:
    """Put the gradients of the phases in the order of the data.

    Parameters
    ----------
    phases : te.Tensor
        The result of :func:`conv_backward_data_by_phases`. A phase without an element of the kernel
        is not in it: its gradient is 0.
    data_shape, strides, padding, data_layout, out_dtype
        As in :func:`conv_backward_data_by_phases`.

    Returns
    -------
    result : te.Tensor
        A tensor of shape ``data_shape`` and dtype ``out_dtype``.
    """
    spatial = spatial_names(data_layout, "NC")

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at, phase, exists = dict(zip(data_layout, index, strict=True)), [], []
        for axis, (name, stride, before) in enumerate(zip(spatial, strides, padding, strict=False)):
            shifted = at[name] + before
            at[name] = shifted // stride - before // stride
            phase.append(shifted % stride)
            exists.append(phase[-1] < phases.shape[axis])
        value = phases(*phase, *(at[name] for name in data_layout)).astype(out_dtype)
        return tirx.if_then_else(tirx.all(*exists), value, tirx.const(0, out_dtype))

    return te.compute(data_shape, element, name="join_phases")
