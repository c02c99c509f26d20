"""Kernels of convolutions and their gradients in the default layouts; the batch may be symbolic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from tvm import relax

from ...ir.compat import dtype_of
from ..kernel.conv.depthwise import MOST_TAPS, depthwise, depthwise_backward_data
from ..kernel.conv.depthwise_weight import depthwise_weight
from ..kernel.conv.direct import conv2d, conv2d_backward_data, conv3d, conv3d_backward_data
from ..kernel.conv.few_channels import conv_few_channels, conv_few_channels_backward_data
from ..kernel.conv.few_channels import is_faster as few_channels_are_faster
from ..kernel.conv.gathering import Gathering
from ..kernel.conv.geometry import Conv2d, Conv3d
from ..kernel.conv.stem_weight import conv_stem
from ..kernel.conv.stem_weight import is_faster as stem_is_faster
from ..kernel.conv.tiles import takes_conv
from ..kernel.conv.weight import conv3d_weight, conv_weight
from ..kernel.conv.weight_tiles import takes_weight_gradient
from ..kernel.conv.winograd import winograd, winograd_backward_data
from ..kernel.conv.winograd_weight import winograd_weight
from ..kernel.language.builder import ceil_div
from ..kernel.matmul.matmul import Matmul, matmul
from ..target import CPU
from ._convolution import convolution_of
from ._winograd import winograd_square
from .registry import CallSite, Kernel, kernel_for

#: The largest strides of a data gradient. Its code has a part for each phase, and grows too long
#: with larger strides.
_LARGEST_STRIDE = 32
_LARGEST_DEPTHWISE_STRIDE = 4

#: The fewest pixels for which a matrix product with images as rows is faster than a kernel with
#: channels as lanes, of any images.
_LARGE_IMAGE = 512

#: The most lanes of the vectors of a small image, relative to its pixels.
_MOST_LANES = 1.15


@kernel_for("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d", takes_uncast=False)
def convolution(site: CallSite) -> Kernel | None:
    """Return the kernel of a convolution."""
    data, weight = site.call.args
    shapes = site.shapes(data, weight, site.call)
    if shapes is None or (conv := convolution_of(site, *shapes)) is None:
        return None
    if isinstance(conv, Conv3d):
        in_tiles = takes_conv(Gathering.forward(conv.slices, conv.depth))
        makers = winograd, conv3d
        return _of_volumes(conv, *makers, site, shapes, [data, weight], in_tiles=in_tiles)
    if _is_product(site, conv, data, weight):
        shapes = [shapes[1], shapes[0], shapes[2]]
        return Kernel(partial(matmul, _product(conv, False), site.cpu, shapes), [weight, data])
    of_pairs = _multiplies_pairs(site, data, weight)
    gathering = Gathering.forward(conv)
    if _multiplies_tiles(site, data, weight) and takes_conv(gathering):
        return Kernel(partial(conv2d, conv, site.cpu, shapes), [data, weight])
    few = few_channels_are_faster(gathering, site.cpu, of_pairs=of_pairs)
    direct = conv_few_channels if few else conv2d
    make = _choose(site, conv, depthwise, winograd, direct, of_pairs=of_pairs)
    return make and Kernel(partial(make, conv, site.cpu, shapes), [data, weight])


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
    if isinstance(conv, Conv3d):
        if max(conv.depth.stride, *conv.slices.strides) > _LARGEST_STRIDE:
            return None
        in_tiles = takes_conv(Gathering.backward(conv.slices, conv.depth))
        makers = winograd_backward_data, conv3d_backward_data
        return _of_volumes(conv, *makers, site, shapes, [output_grad, weight], in_tiles=in_tiles)
    if _is_product(site, conv, output_grad, weight):
        generator = partial(matmul, _product(conv, True), site.cpu, (kernel, out, data))
        return Kernel(generator, [weight, output_grad])
    largest = _LARGEST_DEPTHWISE_STRIDE if conv.is_depthwise else _LARGEST_STRIDE
    if max(conv.strides) > largest:
        return None
    of_pairs = _multiplies_pairs(site, output_grad, weight)
    gathering = Gathering.backward(conv)
    if _multiplies_tiles(site, output_grad, weight) and takes_conv(gathering):
        return Kernel(partial(conv2d_backward_data, conv, site.cpu, shapes), [output_grad, weight])
    few = few_channels_are_faster(gathering, site.cpu, of_pairs=of_pairs)
    direct = conv_few_channels_backward_data if few else conv2d_backward_data
    by_winograd = winograd_backward_data
    make = _choose(site, conv, depthwise_backward_data, by_winograd, direct, of_pairs=of_pairs)
    return make and Kernel(partial(make, conv, site.cpu, shapes), [output_grad, weight])


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
    if conv is None:
        return None
    if isinstance(conv, Conv3d):
        return _of_volumes(
            conv, winograd_weight, conv3d_weight, site, shapes, arguments=[output_grad, data]
        )
    if _multiplies_tiles(site, output_grad, data) and takes_weight_gradient(conv):
        return Kernel(partial(conv_weight, conv, site.cpu, shapes), [output_grad, data])
    direct = conv_stem if stem_is_faster(conv, site.cpu) else conv_weight
    of_pairs = _multiplies_pairs(site, output_grad, data)
    make = _choose(site, conv, depthwise_weight, winograd_weight, direct, of_pairs=of_pairs)
    return make and Kernel(partial(make, conv, site.cpu, shapes), [output_grad, data])


def _of_volumes(
    conv: Conv3d,
    by_winograd: Callable,
    direct: Callable,
    site: CallSite,
    shapes: list,
    arguments: list[relax.Expr],
    *,
    in_tiles: bool = False,
) -> Kernel | None:
    """Return the kernel of a convolution over three axes; ``in_tiles`` tells whether the direct one
    multiplies tiles where the processor has them."""
    if conv.slices.is_depthwise:
        return None
    make = direct
    if not (in_tiles and _multiplies_tiles(site, *arguments)):
        of_pairs = _multiplies_pairs(site, *arguments)
        make = _by_winograd(site, conv, by_winograd, of_pairs) or direct
    return Kernel(partial(make, conv, site.cpu, shapes), arguments)


def _multiplies_pairs(site: CallSite, *factors: relax.Expr) -> bool:
    """Tell whether direct kernels multiply pairs of elements of the factors."""
    return site.cpu.bfloat16 and all(dtype_of(x.ty) == "bfloat16" for x in factors)


def _multiplies_tiles(site: CallSite, *factors: relax.Expr) -> bool:
    """Tell whether kernels multiply tiles of the factors (AMX)."""
    return site.cpu.tiles and all(dtype_of(x.ty) == "bfloat16" for x in factors)


def _choose(
    site: CallSite,
    conv: Conv2d,
    for_depthwise: Callable,
    by_winograd: Callable,
    direct: Callable,
    of_pairs: bool,
) -> Callable[[Conv2d, CPU, list], object] | None:
    """Return the generator of the kernel of a convolution, or None."""
    if conv.is_depthwise:
        return for_depthwise if prod(conv.kernel) <= MOST_TAPS else None
    return _by_winograd(site, conv, by_winograd, of_pairs) or direct


def _by_winograd(
    site: CallSite, conv: Conv2d | Conv3d, make: Callable, of_pairs: bool
) -> Callable[[Conv2d | Conv3d, CPU, list], object] | None:
    """Return the generator of the kernel by Winograd's filtering; None where a direct one is as
    fast."""
    of_weight = make is winograd_weight
    square = winograd_square(conv, site.winograd_tile, of_weight=of_weight, of_pairs=of_pairs)
    return partial(make, square=square) if square else None


def _is_product(site: CallSite, conv: Conv2d, *factors: relax.Expr) -> bool:
    """Tell whether a convolution is computed fastest as the product of its weight and each
    image."""
    steps = (*conv.kernel, *conv.strides, conv.groups)
    if set(steps) != {1} or any(conv.padding):
        return False
    pixels, cpu = prod(conv.size), site.cpu
    if pixels >= _LARGE_IMAGE:
        return True
    if not isinstance(conv.batch, int) or any(dtype_of(x.ty) != "float32" for x in factors):
        return False
    lanes = ceil_div(pixels, cpu.lanes) * cpu.lanes
    fewest = cpu.tuning.convolutions.product_pixels
    return pixels >= fewest and lanes <= _MOST_LANES * pixels


def _product(conv: Conv2d, transpose: bool) -> Matmul:
    """Return the product of the weight, or of its transpose, and each image."""
    channels = conv.out_channels, conv.in_channels
    rows, depth = channels[::-1] if transpose else channels
    return Matmul(rows, prod(conv.size), depth, transpose, batch=conv.batch, shared_a=True)
