"""Kernels of convolutions and their gradients in the default layouts; the batch may be symbolic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import relax

from ...ir.compat import dtype_of
from ..kernel.conv.depthwise import depthwise, depthwise_backward_data
from ..kernel.conv.depthwise_weight import depthwise_weight
from ..kernel.conv.direct import conv2d, conv2d_backward_data, conv3d, conv3d_backward_data
from ..kernel.conv.few_channels import conv_few_channels, conv_few_channels_backward_data
from ..kernel.conv.geometry import Conv2d, Conv3d
from ..kernel.conv.plan import DATA, FORWARD, WEIGHT, product_of, way_of
from ..kernel.conv.stem_weight import conv_stem
from ..kernel.conv.weight import conv3d_weight, conv_weight
from ..kernel.conv.winograd import winograd, winograd_backward_data
from ..kernel.conv.winograd_weight import winograd_weight
from ..kernel.matmul.matmul import matmul
from ._convolution import convolution_of
from .registry import CallSite, Kernel, Shape, kernel_for

#: The generators of kernels, by the results and the ways of convolutions of images. Direct ones
#: multiply tiles of the processor where it has them.
_OF_IMAGES: dict[tuple[str, str], Callable] = {
    (FORWARD, "tiles"): conv2d,
    (FORWARD, "direct"): conv2d,
    (FORWARD, "few channels"): conv_few_channels,
    (FORWARD, "winograd"): winograd,
    (FORWARD, "depthwise"): depthwise,
    (DATA, "tiles"): conv2d_backward_data,
    (DATA, "direct"): conv2d_backward_data,
    (DATA, "few channels"): conv_few_channels_backward_data,
    (DATA, "winograd"): winograd_backward_data,
    (DATA, "depthwise"): depthwise_backward_data,
    (WEIGHT, "tiles"): conv_weight,
    (WEIGHT, "direct"): conv_weight,
    (WEIGHT, "stem"): conv_stem,
    (WEIGHT, "winograd"): winograd_weight,
    (WEIGHT, "depthwise"): depthwise_weight,
}

#: The direct ones of convolutions of volumes.
_OF_VOLUMES: dict[str, Callable] = {
    FORWARD: conv3d,
    DATA: conv3d_backward_data,
    WEIGHT: conv3d_weight,
}


@kernel_for("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d", takes_uncast=False)
def convolution(site: CallSite) -> Kernel | None:
    """Return the kernel of a convolution."""
    data, weight = site.call.args
    shapes = site.shapes(data, weight, site.call)
    if shapes is None or (conv := convolution_of(site, *shapes)) is None:
        return None
    return _kernel(site, conv, FORWARD, [data, weight], shapes)


@kernel_for(
    "relax.grad.conv1d_backward_data",
    "relax.grad.conv2d_backward_data",
    "relax.grad.conv3d_backward_data",
    takes_uncast=False,
)
def data_gradient(site: CallSite) -> Kernel | None:
    """Return the kernel of the data gradient of a convolution."""
    output_grad, _, weight = site.call.args
    return _data_gradient(site, output_grad, weight, "OI")


@kernel_for(
    "relax.nn.conv1d_transpose",
    "relax.nn.conv2d_transpose",
    "relax.nn.conv3d_transpose",
    takes_uncast=False,
)
def transposed_convolution(site: CallSite) -> Kernel | None:
    """Return the kernel of a transposed convolution.

    It is the data gradient of the convolution with the same weight, whose output channels are the
    channels of the data.
    """
    data, weight = site.call.args
    return _data_gradient(site, data, weight, "IO")


def _data_gradient(
    site: CallSite, output_grad: relax.Expr, weight: relax.Expr, channels: str
) -> Kernel | None:
    """Return the kernel whose result is the data gradient of a convolution; ``channels`` is the
    start of the layout."""
    shapes = site.shapes(output_grad, weight, site.call)
    if shapes is None:
        return None
    out, kernel, data = shapes
    conv = convolution_of(site, data, kernel, out, channels=channels)
    if conv is None:
        return None
    return _kernel(site, conv, DATA, [output_grad, weight], shapes)


@kernel_for(
    "relax.grad.conv1d_backward_weight",
    "relax.grad.conv2d_backward_weight",
    "relax.grad.conv3d_backward_weight",
    takes_uncast=False,
)
def weight_gradient(site: CallSite) -> Kernel | None:
    """Return the kernel of the weight gradient of a convolution."""
    output_grad, data, _ = site.call.args
    shapes = site.shapes(output_grad, data, site.call)
    if shapes is None:
        return None
    out, images, weight = shapes
    conv = convolution_of(site, images, weight, out)
    return None if conv is None else _kernel(site, conv, WEIGHT, [output_grad, data], shapes)


def _kernel(
    site: CallSite, conv: Conv2d | Conv3d, of: str, factors: list[relax.Expr], shapes: list[Shape]
) -> Kernel | None:
    """Return the kernel of a convolution or a gradient, a function of two factors."""
    dtypes = [dtype_of(factor.ty) for factor in factors]
    way = way_of(conv, of, site.cpu, dtypes=dtypes, square=site.winograd_tile)
    if way is None:
        return None
    if isinstance(conv, Conv2d) and way.name == "product":
        (images, weight), (of_images, of_weight, result) = factors, shapes
        product = product_of(conv, transpose=of == DATA)
        make = partial(matmul, product, site.cpu, [of_weight, of_images, result])
        return Kernel(make, [weight, images])
    is_direct = isinstance(conv, Conv3d) and way.name != "winograd"
    generator = _OF_VOLUMES[of] if is_direct else _OF_IMAGES[of, way.name]
    square = {"square": way.square} if way.square else {}
    return Kernel(partial(generator, conv, site.cpu, shapes, **square), factors)
