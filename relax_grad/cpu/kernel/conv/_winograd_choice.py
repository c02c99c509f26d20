"""The choice between Winograd's filtering and direct kernels."""

from __future__ import annotations

from math import prod

from ._winograd_plan import is_winograd, parts_of
from ._winograd_tiles import Squares
from .geometry import Conv2d, Conv3d

#: The fewest channels for which Winograd's transforms of tiles cost less than the products that
#: they save: of plain images with 3x3 taps, whose direct kernels are the fastest; of taps along one
#: axis, which save the fewest products; of volumes, whose tiles serve all taps of the depth, for
#: weight gradients and for others; and of other images.
_OF_IMAGES, _OF_ONE_AXIS, _OF_VOLUMES, _OF_OTHERS = 32, 32, (12, 8), 16

#: The largest share of the direct products, for results and padding, that leaves a gain.
_MOST_PRODUCTS = 0.68

#: The fewest tiles whose products outweigh the transform of the weight.
_FEWEST_TILES = 100

#: The fewest rows of tiles, which are the parts that threads share, and the most bytes of a row of
#: transformed tiles, which are to stay in a cache.
_FEWEST_ROWS, _MOST_ROW_BYTES = 8, 3 * 1024 * 1024

#: Expected number of images of a symbolic batch.
_EXPECTED_IMAGES = 8

#: The squares of Winograd's filtering up to which the products that it saves take no longer than
#: its transforms, where direct kernels multiply pairs.
_MOST_SQUARE_OF_PAIRS = 2


def winograd_square(
    conv: Conv2d | Conv3d, square: int, *, of_weight: bool = False, of_pairs: bool = False
) -> int:
    """Return the extent of the squares of results of the fastest kernel; 0 for a direct one.

    Parameters
    ----------
    conv : Conv2d or Conv3d
        The convolution.
    square : int
        The chosen extent, or 0.
    of_weight : bool
        Whether the kernel computes the gradient of the weight.
    of_pairs : bool
        Whether direct kernels multiply pairs of elements.
    """
    if not square or not is_winograd(conv) or (of_pairs and square <= _MOST_SQUARE_OF_PAIRS):
        return 0
    images, depth = parts_of(conv)
    channels = min(images.in_channels, images.out_channels)
    is_plain = images.kernel == (3, 3) and images.dilation == (1, 1)
    if is_plain and isinstance(conv, Conv2d):
        return square if channels >= _OF_IMAGES else 0
    if of_weight and isinstance(conv, Conv3d) and 5 in images.kernel:
        return 0  # these sums over all slices have larger errors
    if 1 in images.kernel:
        few = _OF_ONE_AXIS
    else:
        few = _OF_VOLUMES[not of_weight] if isinstance(conv, Conv3d) else _OF_OTHERS
    batch = images.batch if isinstance(images.batch, int) else _EXPECTED_IMAGES
    squares = Squares.of(images, square)
    cells, wide = squares.cells, squares.wide
    tall = squares.tall * squares.height.phases
    products = tall * wide * cells
    rows = batch * depth.number * tall
    is_worth = (
        channels >= few
        and rows >= _FEWEST_ROWS
        and rows * wide >= _FEWEST_TILES
        and 4 * cells * wide * (images.in_channels + images.out_channels) <= _MOST_ROW_BYTES
        and products <= _MOST_PRODUCTS * prod(images.out_size) * prod(images.kernel)
    )
    return square if is_worth else 0
