"""Kernels of convolutions and their data gradients."""

from __future__ import annotations

from math import prod

from .._compat import dtype_of
from ..kernel.conv import Conv2d, conv2d, conv2d_backward_data
from ..kernel.matmul import Matmul, matmul
from ..op._rank import rank_of, spatial_axes
from ._registry import Kernel, Site, kernel_for

#: With a larger stride, the code of a data gradient, which has a part for each phase, grows too long.
_LARGEST_STRIDE = 32

#: From so many pixels on, a product of matrices whose rows are images is faster than what has channels for lanes.
_LARGE_IMAGE = 512


@kernel_for("relax.nn.conv1d", "relax.nn.conv2d")
def convolution(site: Site) -> Kernel | None:
    """Return the kernel of a convolution in the plain layout; the batch may be symbolic."""
    data, weight = site.call.args
    shapes = [site.shape(each) for each in (data, weight, site.call)]
    conv = convolution_of(site, *shapes)
    if conv is None:
        return None
    if _is_product(conv):
        shapes = [shapes[1], shapes[0], shapes[2]]
        return Kernel(matmul(_product(conv, False), site.cpu, shapes), [weight, data])
    return Kernel(conv2d(conv, site.cpu, shapes), [data, weight])


@kernel_for("relax.grad.conv1d_backward_data", "relax.grad.conv2d_backward_data")
def data_gradient(site: Site) -> Kernel | None:
    """Return the kernel of the data gradient of a convolution in the plain layout."""
    output_grad, _, weight = site.call.args
    out, kernel, data = (site.shape(each) for each in (output_grad, weight, site.call))
    conv = convolution_of(site, data, kernel, out)
    if conv is None or max(conv.strides) > _LARGEST_STRIDE:
        return None
    if _is_product(conv):
        function = matmul(_product(conv, True), site.cpu, (kernel, out, data))
        return Kernel(function, [weight, output_grad])
    function = conv2d_backward_data(conv, site.cpu, (out, kernel, data))
    return Kernel(function, [output_grad, weight])


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
    groups = int(attrs.groups)
    if groups > 1 and groups in data[1:2] + out[1:2]:
        return None
    missing = [1] * (2 - rank)
    padding = [int(size) for size in attrs.padding]
    zeros = [0] * (2 - rank)
    return Conv2d(
        data[0],
        data[1],
        weight[0],
        (*missing, *data[2:]),
        (*missing, *weight[2:]),
        (*missing, *map(int, attrs.strides)),
        (*zeros, *padding[:rank], *zeros, *padding[rank:]),
        (*missing, *map(int, attrs.dilation)),
        groups,
    )


def _is_product(conv: Conv2d) -> bool:
    """Tell whether a convolution is best computed as the product of its weight and each image."""
    steps = (*conv.kernel, *conv.strides, conv.groups)
    return set(steps) == {1} and not any(conv.padding) and prod(conv.size) >= _LARGE_IMAGE


def _product(conv: Conv2d, transpose: bool) -> Matmul:
    """Return the product of the weight, or of the weight transposed, and each image."""
    channels = conv.out_channels, conv.in_channels
    rows, depth = channels[::-1] if transpose else channels
    return Matmul(rows, prod(conv.size), depth, transpose, batch=conv.batch, shared_a=True)
