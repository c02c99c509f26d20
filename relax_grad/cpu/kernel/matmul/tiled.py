"""Products of bfloat16 whose depth is padded to whole tiles (AMX), and panels of their second
factor."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..language import amx
from ..language import builder as b
from ..language.builder import Extent, as_expr, bind, ceil_div, const
from .pairs import PairPacking, Pairs
from .product import Matmul

#: The elements of k in a tile.
ELEMENTS = 2 * amx.STEPS


@dataclass(frozen=True)
class Tiled(Pairs):
    """A product of pairs whose depth is padded to whole tiles."""

    @staticmethod
    def of(p: Matmul) -> Tiled:
        """Return the product of tiles for one of elements."""
        depth = ceil_div(p.depth, ELEMENTS) * amx.STEPS
        sizes = (p.rows, p.columns, depth, p.transpose_a, p.transpose_b)
        return Tiled(*sizes, p.batch, p.shared_a, p.shared_b, p.depth)

    @property
    def pairs(self) -> Extent:
        """The pairs of k that have elements."""
        return ceil_div(self.elements, 2)

    @property
    def is_whole(self) -> bool:
        """Whether k is known to consist of whole tiles."""
        return isinstance(self.elements, int) and self.elements % ELEMENTS == 0

    @property
    def is_in_place(self) -> bool:
        """Whether tiles read A in place."""
        return self.is_whole and not self.transpose_a

    def existing(self, k0: tirx.PrimExpr, size: Extent) -> Extent:
        """Return the pairs of a stretch that have elements."""
        if self.is_whole:
            return size
        return bind(tirx.max(const(0), tirx.min(as_expr(size), as_expr(self.pairs) - k0)))


class TilePacking(PairPacking):
    """Panels of pairs of B, ``[pair][width]``, with zeros in place of pairs without elements."""

    p: Tiled

    def pack(self, source: tuple, target: tuple, depth: tuple, group: int = 1) -> None:
        (panels, base, step), (k0, size) = target, depth
        existing = self.p.existing(k0, size)
        self.pack_existing(source, target, (k0, existing), group)
        if self.p.is_whole:
            return
        with b.serial(existing, size) as k, b.serial(0, group) as i:
            to = bind(base + i * step + k * self.width)
            for v in range(self.tile_vectors):
                self.vectors.store(panels, to + v * self.vectors.lanes, self.vectors.splat(0))

    def pack_existing(self, source: tuple, target: tuple, depth: tuple, group: int) -> None:
        """Copy pairs that have elements, as :meth:`pack` does."""
        super().pack(source, target, depth, group)
