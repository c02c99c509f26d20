"""The sizes of the tiles of attention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...target import CPU
from ..language.builder import Extent, ceil_div
from .sizes import Attention

#: The features from which wide tiles are faster, the keys, and the keys under a causal mask, which
#: excludes parts of wide panels.
_WIDE_FEATURES, _WIDE_KEYS, _WIDE_CAUSAL = 33, 49, 128

#: The least rows of a tile, and the multiply-adds that take as long as one waits for another.
_LEAST_HEIGHT, _WAITING = 4, 8


@dataclass(frozen=True)
class Tiles:
    """The sizes of tiles.

    Attributes
    ----------
    lanes : int
        The elements of a vector.
    rows, key_rows : int
        The rows of a tile whose rows are queries, and of one whose rows are keys.
    vectors : int
        The vectors of keys of a row of scores.
    most_vectors : int
        The most vectors of features of a row.
    """

    lanes: int
    rows: int
    key_rows: int
    vectors: int
    most_vectors: int

    @staticmethod
    def of(of: Attention, cpu: CPU) -> Tiles:
        """Return the tiles for some sizes.

        Intel's processors before Ice Lake issue at most four instructions at once. With wide tiles
        they need fewer loads for a multiply-add: in two threads of a Cascade Lake, attention takes
        0.93 of the time of narrow tiles, and its gradient 0.92 (the means of 13 sizes). Cooper
        Lake, which multiplies pairs of bfloat16, was not measured.
        """
        tiles = cpu.tuning.attention
        rows, most = tiles.wide if tiles.wide and _is_wide(of, cpu) else tiles.largest
        vectors = 1 if of.has_few_keys and of.keys <= cpu.lanes else most
        height, key_height = (_height(extent, rows, most) for extent in (of.queries, of.keys))
        return Tiles(cpu.lanes, height, key_height, vectors, most)

    def padded(self, features: int) -> int:
        """Return a number of features, rounded to whole vectors."""
        return ceil_div(features, self.lanes) * self.lanes

    def columns_of(self, features: int) -> list[tuple[int, int]]:
        """Return the first column of each tile of a row of features, and the number of its
        vectors."""
        vectors = ceil_div(features, self.lanes)
        number = ceil_div(vectors, self.most_vectors)
        ends = [ceil_div(vectors * i, number) for i in range(number + 1)]
        return [(first * self.lanes, end - first) for first, end in pairwise(ends)]


def _is_wide(of: Attention, cpu: CPU) -> bool:
    if cpu.bfloat16:
        return False
    least = _WIDE_KEYS if of.causal_mask is None else _WIDE_CAUSAL
    has_many = not isinstance(of.keys, int) or of.keys >= least
    return has_many and min(of.features, of.value_features) >= _WIDE_FEATURES


def _height(extent: Extent, most: int, vectors: int) -> int:
    """Return the height of strips with which some rows take the shortest time.

    A tile takes as long as its multiply-adds, but no less than these wait for each other, and some
    more for its first and last instructions.
    """
    if not isinstance(extent, int):
        return most
    return min(
        range(most, _LEAST_HEIGHT - 1, -1),
        key=lambda height: ceil_div(extent, height) * (max(height * vectors, _WAITING) + 1),
    )
