"""The plans of matrix products: values, with a line of text for each decision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...limits import ProductTiles
from ...target import CPU
from ..language.builder import Extent, ceil_div
from ..language.plans import Plan, ahead_as_text, extent_as_text, processor_as_text
from ._tasks import Shares, largest_of
from .product import Matmul

_WAYS = {
    "few rows": "B is read in place",
    "packed": "B is packed into panels",
    "turned": "the product of the transposed factors, whose result is transposed",
    "at run time": "B is read in place or packed, by the number of rows",
}

_READINGS = {
    "in place": "in place",
    "copied": "from a copy of rows by each task",
    "strips": "from a copy of strips by each task",
    "transposed": "from a transposed copy of strips by each task",
}


@dataclass(frozen=True)
class InPlacePlan(Plan):
    """A product of few rows, which reads B in place.

    Attributes
    ----------
    product : Matmul
        The product.
    lanes : int
        The elements of a vector.
    height : int
        The rows of a tile.
    vectors : int
        The vectors of a tile, or its columns if vectors run along k.
    ahead : int
        The steps of k that rows of B are prefetched before they are read, or 0.
    """

    product: Matmul
    lanes: int
    height: int
    vectors: int
    ahead: int

    @property
    def width(self) -> int:
        """The columns of a tile."""
        return self.vectors * (1 if self.product.transpose_b else self.lanes)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        along = "dot products" if self.product.transpose_b else "vectors"
        return {
            "tile in place": f"{self.height} rows x {self.vectors} {along}",
            "prefetch of B": ahead_as_text(self.ahead),
        }


@dataclass(frozen=True)
class PackedPlan(Plan):
    """A product whose B is packed into panels. Extents that are not known are expressions.

    Attributes
    ----------
    product : Matmul
        The product; of pairs, if bfloat16 is multiplied in pairs or in tiles.
    lanes, cores : int
        The elements of a vector, and the threads that share the work.
    height, vectors : int
        The rows and vectors of a tile: a strip of A and a panel of B.
    tiles : ProductTiles
        The rounds of a tile's loop.
    by_rows : bool
        Whether tasks compute strip by strip, and pack all panels that they read before.
    stretch : int
        The steps of k that a tile sums over at once.
    parts : int
        The parts of k that are summed separately, each by separate threads.
    part : int or tirx.PrimExpr
        The steps of each part but the last one.
    strips, panels : int or tirx.PrimExpr
        The strips and panels of the product.
    largest, copied : tuple[int, int]
        The most strips and panels of a task, and the rows and columns that cost as much as its
        copies.
    tasks : tuple[int, int] or None
        The tasks that share the strips, and the panels; None if the kernel computes them from
        symbolic extents. Under work stealing, the blocks of strips and of panels.
    shares : Shares or None
        The parts that threads steal from each other.
    packs_late : bool
        Whether each task packs the panels that it reads; otherwise, all are packed before.
    reading : str
        How tiles read A: a key of :data:`relax_grad.cpu.kernel.matmul._factor.READERS`.
    ahead_a, ahead_b : int
        The steps of k that rows are prefetched before they are copied, or 0.
    is_near : bool
        Whether a second-level cache holds B.
    prefetches : bool or None
        Whether tasks prefetch the next panel; None as for ``tasks``.
    spreads : bool
        Whether tiles spread their prefetches over their steps.
    steals_loops : bool
        Whether threads steal iterations of loops.
    """

    product: Matmul
    lanes: int
    cores: int
    height: int
    vectors: int
    tiles: ProductTiles = field(repr=False)
    by_rows: bool
    stretch: int
    parts: int
    part: Extent
    strips: Extent
    panels: Extent
    largest: tuple[int, int]
    copied: tuple[int, int]
    tasks: tuple[int, int] | None
    shares: Shares | None
    packs_late: bool
    reading: str
    ahead_a: int
    ahead_b: int
    is_near: bool
    prefetches: bool | None
    spreads: bool
    steals_loops: bool

    @property
    def width(self) -> int:
        """The columns of a panel."""
        return self.vectors * self.lanes

    @property
    def block(self) -> tuple[int, int] | None:
        """The most strips and panels of a task, if they are known."""
        if self.tasks is None:
            return None
        return largest_of((self.strips, self.panels), self.tasks)

    def round_of(self, rows: int, vectors: int, *, is_whole: bool) -> int:
        """Return the steps of a round of the tiles of some rows and vectors.

        ``is_whole`` tells whether all vectors of a panel are in the tile. Rare tiles have one step.
        """
        if self._share(rows, vectors, is_whole) < self.tiles.least_share:
            return 1
        return self.round

    @property
    def round(self) -> int:
        """The steps of a round of a tile's loop."""
        depth, round_ = self.product.depth, self.tiles.round
        is_few = isinstance(depth, int) and depth < self.tiles.few_steps
        return math.gcd(depth, round_) if is_few else round_

    def _share(self, rows: int, vectors: int, is_whole: bool) -> float:
        """Return the share of some tiles in the steps of a product; 1 if an extent is symbolic."""
        product = self.product
        if not product.is_static:
            return 1.0
        whole = product.rows // self.height if rows == self.height else 1
        number = ceil_div(product.columns, self.lanes)
        rest = ceil_div(product.columns % self.width, self.lanes)
        of_vectors = number - rest if is_whole and vectors == self.vectors else rest
        return rows * whole * of_vectors / (product.rows * number)

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        lines = {
            "tile": f"{self.height} rows x {self.vectors} vectors, rounds of {self.round} steps",
            "order": "strips, then panels" if self.by_rows else "panels, then strips",
            "depth": f"{self.stretch} steps at once, k in {self.parts} parts",
            "strips, panels": f"{extent_as_text(self.strips)} x {extent_as_text(self.panels)}",
            "tasks": self._tasks_as_text(),
            "panels of B": "packed by each task" if self.packs_late else "packed before the tasks",
            "A": f"read {_READINGS[self.reading]}",
            "prefetch": f"A {ahead_as_text(self.ahead_a)}, B {ahead_as_text(self.ahead_b)}",
            "next panel": "not prefetched" if self.prefetches is False else "prefetched",
        }
        if self.spreads:
            lines["next panel"] += ", over the steps of a tile"
        return lines

    def _tasks_as_text(self) -> str:
        if self.tasks is None:
            return "divided at run time"
        down, across = self.tasks
        if self.shares is None:
            return f"{down} x {across}"
        what = "blocks of strips" if self.shares.of_strips else "panels"
        return f"{down} x {across} blocks; threads steal {self.shares.items} {what}"


@dataclass(frozen=True)
class TransposedPlan(Plan):
    """A product computed from the transposed factors, whose result is transposed.

    Attributes
    ----------
    inner : MatmulPlan
        The plan of the product of the transposed factors.
    most : int
        The rows of C that a task transposes.
    tasks : int
        The tasks of each product.
    in_one_thread : bool
        Whether one thread transposes C.
    """

    inner: MatmulPlan
    most: int
    tasks: int
    in_one_thread: bool

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        inner = self.inner.lines()
        own = {name: inner[name] for name in inner if name not in ("processor", "measured")}
        return {
            **{f"inner {name}": text for name, text in own.items()},
            "transposition": f"{self.tasks} tasks of {self.most} rows",
        }


@dataclass(frozen=True)
class MatmulPlan(Plan):
    """The way to compute a batch of matrix products.

    Attributes
    ----------
    product : Matmul
        The products.
    cpu : CPU
        The processor.
    way : str
        ``"few rows"`` (B is read in place), ``"packed"``, ``"turned"`` (the factors change places),
        or ``"at run time"``: one of the first two, by the number of rows.
    swaps : bool
        Whether ``product`` has the transposed factors, because C is a single column.
    most_rows : int
        The rows up to which B is read in place.
    in_one_thread : bool
        Whether one thread computes the products.
    pairs : bool
        Whether bfloat16 is multiplied in pairs.
    tiles : bool
        Whether bfloat16 is multiplied in tiles (AMX).
    in_place : InPlacePlan or None
        The plan to read B in place.
    packed : PackedPlan or None
        The plan to pack B.
    transposed : TransposedPlan or None
        The plan of the transposed factors.
    """

    product: Matmul
    cpu: CPU
    way: str
    swaps: bool = False
    most_rows: int = 0
    in_one_thread: bool = False
    pairs: bool = False
    tiles: bool = False
    in_place: InPlacePlan | None = None
    packed: PackedPlan | None = None
    transposed: TransposedPlan | None = None

    def lines(self) -> dict[str, str]:
        """Return the decisions and their values as text."""
        lines = {
            "product": _product(self.product),
            "processor": processor_as_text(self.cpu),
            "measured": self.cpu.tuning.measured,
            "way": _WAYS[self.way],
            "threads": "1: the product is small" if self.in_one_thread else str(self.cpu.cores),
        }
        if self.swaps:
            lines["way"] += "; A and B change places, as C is one column"
        if self.pairs:
            lines["elements"] = "pairs of bfloat16"
        if self.tiles:
            lines["elements"] = "tiles of bfloat16 (AMX)"
        if self.way == "at run time":
            lines["in place up to"] = f"{self.most_rows} rows"
        for part in (self.in_place, self.packed, self.transposed):
            lines |= {} if part is None else part.lines()
        return lines


def _product(product: Matmul) -> str:
    form = "".join("NT"[turned] for turned in (product.transpose_a, product.transpose_b))
    batch = "" if isinstance(product.batch, int) and product.batch == 1 else f"{product.batch} of "
    return f"{batch}{product.rows} x {product.columns}, {product.depth} steps, {form}"
