"""Kernels of the weight gradients of convolutions."""

from __future__ import annotations

from ..kernel.conv_stem import conv_stem, fits
from ..kernel.conv_weight import conv_weight
from ._convolution import convolution_of
from ._registry import Kernel, Site, kernel_for


@kernel_for("relax.grad.conv1d_backward_weight", "relax.grad.conv2d_backward_weight")
def weight_gradient(site: Site) -> Kernel | None:
    """Return the kernel of the weight gradient of a convolution in the plain layout; the batch may be symbolic."""
    output_grad, data, _ = site.call.args
    shapes = [site.shape(each) for each in (output_grad, data, site.call)]
    out, images, weight = shapes
    conv = convolution_of(site, images, weight, out)
    if conv is None or conv.is_depthwise:
        return None
    kernel = conv_stem if fits(conv, site.cpu) else conv_weight
    return Kernel(kernel(conv, site.cpu, shapes), [output_grad, data])
