"""Plans of attention and its gradient: the tiles and the blocks of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ...target import CPU
from ..language import amx
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, ahead_as_text, extent_as_text
from ._tiles import Tiles
from .sizes import Attention

#: The numbers of queries and of keys of a block, rounded to whole tiles.
_ROWS, _COLUMNS = 64, 128

#: The elements that products multiply.
ELEMENTS = {"plain": "one at a time", "pairs": "pairs of bfloat16", "tiles": "tiles of bfloat16"}


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """The tiles and blocks of attention.

    Attributes
    ----------
    of : Attention
        The sizes and the masks.
    tiles : Tiles
        The tiles of products.
    elements : str
        The elements that products multiply: a key of :data:`ELEMENTS`.
    ahead : int
        The rows of several heads that are prefetched before they are copied, or 0.
    """

    of: Attention
    tiles: Tiles
    elements: str
    ahead: int

    @property
    def lanes(self) -> int:
        """The elements of a vector."""
        return self.tiles.lanes

    @property
    def step(self) -> int:
        """The elements of each factor that a step multiplies."""
        return 1 if self.elements == "plain" else 2

    @property
    def whole(self) -> int:
        """The number to multiples of which pairs that are summed over are padded, with zeros."""
        return amx.STEPS if self.elements == "tiles" else 1

    @property
    def spare(self) -> int:
        """The rows of a tile that a copy has beyond the last one."""
        return amx.ROWS if self.elements == "tiles" else 0

    @property
    def tile_rows(self) -> int:
        """The rows of a tile whose rows are queries."""
        return self.tiles.rows

    @property
    def key_rows(self) -> int:
        """The rows of a tile whose rows are keys."""
        return self.tiles.key_rows

    @property
    def tile_vectors(self) -> int:
        """The vectors of keys of a tile."""
        return self.tiles.vectors

    @property
    def width(self) -> int:
        """The number of keys of a panel, as many as columns of a tile."""
        return self.tile_vectors * self.lanes

    @cached_property
    def rows(self) -> int:
        """The number of queries of a block."""
        strips = _ROWS // self.tile_rows
        # Blocks have an even number of rows, as pairs do not cross them.
        return (strips - strips * self.tile_rows % 2) * self.tile_rows

    @cached_property
    def panels(self) -> int:
        """The number of panels of a block."""
        if self.of.has_few_keys:
            return ceil_div(self.of.keys, self.width)
        return max(1, _COLUMNS // self.width)

    @property
    def columns(self) -> int:
        """The number of keys of a block."""
        return self.panels * self.width

    @property
    def pitch(self) -> int:
        """The stride of the rows of scores."""
        return self.columns + self.lanes

    @property
    def has_one_block_of_queries(self) -> bool:
        """Whether one block has all queries, and these are so many that each key has one under a
        causal mask."""
        of = self.of
        if not isinstance(of.queries, int) or of.queries > self.rows:
            return False
        return of.causal_mask is None or (isinstance(of.keys, int) and of.keys <= of.queries)

    def padded(self, features: int) -> int:
        """Return a number of features, rounded to whole vectors."""
        return self.tiles.padded(features)

    def depth_of(self, elements: Extent) -> Extent:
        """Return the steps of a sum of some elements, with those that are padding."""
        return ceil_div(ceil_div(elements, self.step), self.whole) * self.whole

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        queries, keys = extent_as_text(self.of.queries), extent_as_text(self.of.keys)
        return {
            "elements": ELEMENTS[self.elements],
            "tile": f"{self.tile_rows} queries or {self.key_rows} keys x {self.tile_vectors} "
            "vectors",
            "block": f"{self.rows} of {queries} queries x {self.columns} of {keys} keys",
            "prefetch": ahead_as_text(self.ahead),
        }


def attention_plan(of: Attention, cpu: CPU, elements: str = "plain") -> AttentionPlan:
    """Return the plan of attention, or of its gradient, whose products multiply some elements."""
    tiles = Tiles.of(of, cpu)
    if elements == "tiles":
        vectors = 1 if of.has_few_keys and of.keys <= cpu.lanes else 2
        tiles = replace(tiles, rows=amx.ROWS, key_rows=amx.ROWS, vectors=vectors)
    return AttentionPlan(of, tiles, elements, cpu.tuning.prefetch.steps)
