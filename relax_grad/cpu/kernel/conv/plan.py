"""The plan of a convolution or of one of its gradients: the kernel to compute it with, and the plan
of this kernel, as a value.

:func:`way_of` chooses the kernel, by the sizes of the convolution and the processor's
:class:`~relax_grad.cpu.tuning.Tuning`. The generators emit the plans of their modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, extent_as_text, processor_as_text
from ..matmul.plan import plan as matmul_plan
from ..matmul.product import Matmul
from ._depthwise_plan import Gather, depthwise_plan, depthwise_weight_plan
from ._direct_plan import direct_plan, plan_of_pairs
from ._few_channels_plan import few_channels_plan
from ._few_channels_plan import is_faster as few_channels_are_faster
from ._tiles_plan import takes_conv, takes_weight_gradient, tiles_plan, weight_tiles_plan
from ._weight_plan import stem_is_faster, stem_plan, weight_plan
from ._winograd_choice import winograd_square
from ._winograd_plan import winograd_data_plan, winograd_plan
from ._winograd_weight_plan import winograd_weight_plan
from .gathering import Gathering
from .geometry import Conv2d, Conv3d

#: The results of the kernels of a convolution.
FORWARD, DATA, WEIGHT = "result", "data gradient", "weight gradient"

#: The extents m of squares with a choice of accuracy.
SQUARES = (2, 4)

#: The ways to compute a convolution or a gradient.
WAYS = {
    "product": "the product of the weight and each image",
    "tiles": "tiles of bfloat16 (AMX)",
    "depthwise": "each channel by itself, channels as lanes",
    "winograd": "Winograd's filtering, channels as lanes",
    "few channels": "direct, columns as lanes",
    "stem": "direct, output channels as lanes",
    "direct": "direct, channels as lanes",
}

#: The maximum number of taps of depthwise convolutions; with more, the code is too long.
MOST_TAPS = 128

#: The largest strides of a data gradient. Its code has a part for each phase, and grows too long
#: with larger strides.
_LARGEST_STRIDE = 32
_LARGEST_DEPTHWISE_STRIDE = 4

#: The fewest pixels for which a matrix product with images as rows is faster than a kernel with
#: channels as lanes, of any images.
_LARGE_IMAGE = 512

#: The most lanes of the vectors of a small image, relative to its pixels.
_MOST_LANES = 1.15


@dataclass(frozen=True)
class Way:
    """The choice of a kernel.

    Attributes
    ----------
    name : str
        A key of :data:`WAYS`.
    square : int
        The extent of the squares of Winograd's filtering, or 0.
    """

    name: str
    square: int = 0


def way_of(
    conv: Conv2d | Conv3d,
    of: str,
    cpu: CPU,
    *,
    dtypes: Sequence[str] = ("float32", "float32"),
    square: int = 2,
) -> Way | None:
    """Return the fastest way to compute a convolution or a gradient; None if no kernel does.

    Parameters
    ----------
    conv : Conv2d or Conv3d
        The convolution.
    of : str
        :data:`FORWARD`, :data:`DATA` or :data:`WEIGHT`.
    cpu : CPU
        The processor.
    dtypes : Sequence[str]
        The dtypes of both factors.
    square : int
        The extent of the squares of Winograd's filtering: 2, 4, or 0 for other ways.
    """
    is_half = set(dtypes) == {"bfloat16"}
    of_pairs, of_tiles = cpu.bfloat16 and is_half, cpu.tiles and is_half
    if isinstance(conv, Conv3d):
        return _way_of_volumes(conv, of, of_pairs=of_pairs, of_tiles=of_tiles, square=square)
    if of != WEIGHT and _is_product(conv, cpu, dtypes):
        return Way("product")
    if of == DATA and max(conv.strides) > (
        _LARGEST_DEPTHWISE_STRIDE if conv.is_depthwise else _LARGEST_STRIDE
    ):
        return None
    if of_tiles and _takes_tiles(conv, of):
        return Way("tiles")
    if conv.is_depthwise:
        return Way("depthwise") if prod(conv.kernel) <= MOST_TAPS else None
    if square := winograd_square(conv, square, of_weight=of == WEIGHT, of_pairs=of_pairs):
        return Way("winograd", square)
    if of == WEIGHT:
        return Way("stem" if stem_is_faster(conv, cpu) else "direct")
    few = few_channels_are_faster(_gathering(conv, of), cpu, of_pairs=of_pairs)
    return Way("few channels" if few else "direct")


def _way_of_volumes(
    conv: Conv3d, of: str, *, of_pairs: bool, of_tiles: bool, square: int
) -> Way | None:
    if conv.slices.is_depthwise:
        return None
    if of == DATA and max(conv.depth.stride, *conv.slices.strides) > _LARGEST_STRIDE:
        return None
    if of_tiles and of != WEIGHT and takes_conv(_gathering(conv, of)):
        return Way("tiles")
    square = winograd_square(conv, square, of_weight=of == WEIGHT, of_pairs=of_pairs)
    return Way("winograd", square) if square else Way("direct")


def _takes_tiles(conv: Conv2d, of: str) -> bool:
    """Tell whether tiles are the fastest for a convolution of images."""
    return takes_weight_gradient(conv) if of == WEIGHT else takes_conv(_gathering(conv, of))


def _gathering(conv: Conv2d | Conv3d, of: str) -> Gathering:
    make = Gathering.forward if of == FORWARD else Gathering.backward
    return make(conv.slices, conv.depth) if isinstance(conv, Conv3d) else make(conv)


def _is_product(conv: Conv2d, cpu: CPU, dtypes: Sequence[str]) -> bool:
    """Tell whether a convolution is computed fastest as the product of its weight and each
    image."""
    steps = (*conv.kernel, *conv.strides, conv.groups)
    if set(steps) != {1} or any(conv.padding):
        return False
    pixels = prod(conv.size)
    if pixels >= _LARGE_IMAGE:
        return True
    if not isinstance(conv.batch, int) or set(dtypes) != {"float32"}:
        return False
    lanes = ceil_div(pixels, cpu.lanes) * cpu.lanes
    fewest = cpu.tuning.convolutions.product_pixels
    return pixels >= fewest and lanes <= _MOST_LANES * pixels


def product_of(conv: Conv2d, *, transpose: bool) -> Matmul:
    """Return the product of the weight, or of its transpose, and each image."""
    channels = conv.out_channels, conv.in_channels
    rows, depth = channels[::-1] if transpose else channels
    return Matmul(rows, prod(conv.size), depth, transpose, batch=conv.batch, shared_a=True)


@dataclass(frozen=True)
class ConvPlan(Plan):
    """The plan of a convolution or of one of its gradients.

    Attributes
    ----------
    conv : Conv2d or Conv3d
        The convolution.
    of : str
        The result: :data:`FORWARD`, :data:`DATA` or :data:`WEIGHT`.
    cpu : CPU
        The processor.
    way : Way
        The kernel.
    kernel : Plan
        The plan of the kernel.
    pairs : bool
        Whether bfloat16 is multiplied in pairs.
    """

    conv: Conv2d | Conv3d
    of: str
    cpu: CPU
    way: Way
    kernel: Plan
    pairs: bool = False

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        kernel = self.kernel.lines()
        lines = {
            "convolution": f"{_shape(self.conv.data_shape)}, {_shape(self.conv.weight_shape)}",
            "computes": self.of,
            "processor": processor_as_text(self.cpu),
            "measured": self.cpu.tuning.measured,
            "kernel": WAYS[self.way.name],
            "threads": str(self.cpu.cores),
        }
        if self.pairs:
            lines["elements"] = "pairs of bfloat16"
        return lines | kernel


def plan(
    conv: Conv2d | Conv3d,
    of: str,
    cpu: CPU,
    *,
    dtypes: Sequence[str] = ("float32", "float32"),
    square: int = 2,
) -> ConvPlan | None:
    """Return the plan of a convolution or a gradient; None if no kernel computes it.

    Parameters
    ----------
    conv, of, cpu, dtypes, square
        As for :func:`way_of`.
    """
    way = way_of(conv, of, cpu, dtypes=dtypes, square=square)
    if way is None:
        return None
    pairs = cpu.bfloat16 and set(dtypes) == {"bfloat16"} and way.name in ("direct", "stem")
    return ConvPlan(
        conv, of, cpu, way=way, kernel=_kernel_plan(conv, of, cpu, way, pairs=pairs), pairs=pairs
    )


def _kernel_plan(conv: Conv2d | Conv3d, of: str, cpu: CPU, way: Way, *, pairs: bool) -> Plan:
    if way.name == "winograd":
        by_result = {FORWARD: winograd_plan, DATA: winograd_data_plan, WEIGHT: winograd_weight_plan}
        return by_result[of](conv, cpu, way.square)
    if way.name in ("direct", "tiles") and of != WEIGHT:
        if way.name == "tiles":
            return tiles_plan(_flattened(conv, of), cpu)
        return (plan_of_pairs if pairs else direct_plan)(_flattened(conv, of), cpu)
    if isinstance(conv, Conv3d):
        return weight_plan(conv.slices, cpu, conv.depth)
    if way.name == "product":
        return matmul_plan(product_of(conv, transpose=of == DATA), cpu)
    if way.name == "few channels":
        return few_channels_plan(_gathering(conv, of), cpu)
    if way.name == "depthwise":
        if of == WEIGHT:
            return depthwise_weight_plan(conv, cpu)
        make = Gather.forward if of == FORWARD else Gather.backward
        return depthwise_plan(conv, cpu, make(conv.height), make(conv.width))
    by_way = {"tiles": weight_tiles_plan, "stem": stem_plan, "direct": weight_plan}
    return by_way[way.name](conv, cpu)


def _flattened(conv: Conv2d | Conv3d, of: str) -> Gathering:
    return _gathering(conv.flattened if isinstance(conv, Conv2d) else conv, of)


def _shape(shape: Sequence[Extent]) -> str:
    return " x ".join(map(extent_as_text, shape))
