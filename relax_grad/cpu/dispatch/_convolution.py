"""The geometry of the convolution that a call computes or differentiates."""

from __future__ import annotations

from dataclasses import astuple

from ...op.rank import rank_of, spatial_axes
from ..kernel.conv.geometry import ONE, Conv2d, Conv3d, Windows
from .registry import CallSite, Shape


def convolution_of(
    site: CallSite,
    data: Shape,
    weight: Shape,
    out: Shape,
    *,
    channels: str = "OI",
) -> Conv2d | Conv3d | None:
    """Return the convolution with these shapes of data, weight and result; None if no kernel
    supports it.

    ``channels`` is the start of the layout of the weight: the names of its first two axes in the
    operator of the call.

    A convolution over one axis becomes one over two axes, and the first of them has extent 1. A
    convolution over three axes becomes one over two axes where both compute the same.
    """
    attrs, rank = site.call.attrs, rank_of(site.call)
    names = spatial_axes(rank)
    plain = [f"NC{names}", f"{channels}{names}", f"NC{names}"]
    if not site.is_of(site.call.ty):
        return None
    if [attrs.data_layout, attrs.kernel_layout, attrs.out_layout] != plain:
        return None
    if not all(isinstance(extent, int) for extent in (*data[1:], *weight, *out[1:])):
        return None
    padding = [int(size) for size in attrs.padding]
    if min(padding) < 0:
        return None
    axes = [
        Windows(*map(int, axis))
        for axis in zip(
            data[2:],
            weight[2:],
            attrs.strides,
            padding[:rank],
            padding[rank:],
            attrs.dilation,
            strict=True,
        )
    ]
    if [axis.number for axis in axes] != list(out[2:]):
        return None
    *depth, height, width = [ONE, *axes][-max(2, rank) :]
    size, kernel, strides, before, after, dilation = zip(
        astuple(height), astuple(width), strict=True
    )
    conv = Conv2d(
        data[0],
        data[1],
        weight[0],
        size=size,
        kernel=kernel,
        strides=strides,
        padding=(*before, *after),
        dilation=dilation,
        groups=int(attrs.groups),
    )
    if not depth:
        return conv
    volumes = Conv3d(conv, *depth)
    return volumes.of_two_axes or volumes
