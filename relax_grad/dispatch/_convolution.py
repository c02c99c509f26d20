"""Which convolution a call is about."""

from __future__ import annotations

from .._compat import dtype_of
from ..kernel._convolution import Conv2d
from ..op._rank import rank_of, spatial_axes
from ._registry import Site


def convolution_of(site: Site, data, weight, out) -> Conv2d | None:
    """Return the convolution whose data, weight and result have these shapes; None where no kernel fits it.

    One over one axis is one over two, of which the first has extent 1.
    """
    attrs, rank = site.call.attrs, rank_of(site.call)
    axes = spatial_axes(rank)
    plain = [f"NC{axes}", f"OI{axes}", f"NC{axes}"]
    if None in (data, weight, out) or dtype_of(site.call.ty) != "float32":
        return None
    if [attrs.data_layout, attrs.kernel_layout, attrs.out_layout] != plain:
        return None
    if not all(isinstance(extent, int) for extent in (*data[1:], *weight, *out[1:])):
        return None
    ones, zeros = [1] * (2 - rank), [0] * (2 - rank)
    padding = [int(size) for size in attrs.padding]
    conv = Conv2d(
        data[0],
        data[1],
        weight[0],
        (*ones, *data[2:]),
        (*ones, *weight[2:]),
        (*ones, *map(int, attrs.strides)),
        (*zeros, *padding[:rank], *zeros, *padding[rank:]),
        (*ones, *map(int, attrs.dilation)),
        int(attrs.groups),
    )
    return conv if min(padding) >= 0 and conv.out_size == (*ones, *out[2:]) else None
