"""Kernels of depthwise convolutions and their gradients."""

from __future__ import annotations

from ..kernel._convolution import Conv2d
from ..kernel.depthwise import MOST_TAPS, depthwise, depthwise_backward_data
from ..kernel.depthwise_weight import depthwise_weight
from ._convolution import convolution_of
from ._registry import Kernel, Site, kernel_for

#: With larger strides, the code of a data gradient, which has a part for each remainder, grows too long.
_LARGEST_STRIDE = 4


@kernel_for("relax.nn.conv1d", "relax.nn.conv2d")
def convolution(site: Site) -> Kernel | None:
    """Return the kernel of a depthwise convolution in the plain layout; the batch may be symbolic."""
    data, weight = site.call.args
    shapes = [site.shape(each) for each in (data, weight, site.call)]
    conv = convolution_of(site, *shapes)
    return Kernel(depthwise(conv, site.cpu, shapes), [data, weight]) if _fits(conv) else None


@kernel_for("relax.grad.conv1d_backward_data", "relax.grad.conv2d_backward_data")
def data_gradient(site: Site) -> Kernel | None:
    """Return the kernel of its data gradient."""
    output_grad, _, weight = site.call.args
    shapes = [site.shape(each) for each in (output_grad, weight, site.call)]
    out, kernel, data = shapes
    conv = convolution_of(site, data, kernel, out)
    if not _fits(conv) or max(conv.strides) > _LARGEST_STRIDE:
        return None
    return Kernel(depthwise_backward_data(conv, site.cpu, shapes), [output_grad, weight])


@kernel_for("relax.grad.conv1d_backward_weight", "relax.grad.conv2d_backward_weight")
def weight_gradient(site: Site) -> Kernel | None:
    """Return the kernel of its weight gradient."""
    output_grad, data, _ = site.call.args
    shapes = [site.shape(each) for each in (output_grad, data, site.call)]
    out, images, weight = shapes
    conv = convolution_of(site, images, weight, out)
    if not _fits(conv):
        return None
    return Kernel(depthwise_weight(conv, site.cpu, shapes), [output_grad, data])


def _fits(conv: Conv2d | None) -> bool:
    return conv is not None and conv.is_depthwise and conv.kernel[0] * conv.kernel[1] <= MOST_TAPS
