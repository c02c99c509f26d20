"""The plan of a matrix product: the way to compute it, its tiles, tasks and copies, as a value.

:func:`plan` asks each question once, of the sizes of a product and of the processor's
:class:`~relax_grad.cpu.tuning.Tuning`. The generators emit a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...target import CPU
from ...tuning import Tuning
from ..language.amx import ROWS, STEPS
from ..language.builder import Extent, ceil_div
from . import _tasks, _ways
from ._plans import InPlacePlan, MatmulPlan, PackedPlan, TransposedPlan
from .pairs import Pairs
from .product import Matmul, is_one
from .tile import equal_height
from .tiled import Tiled


def plan(
    product: Matmul,
    cpu: CPU,
    *,
    way: str | None = None,
    adds_bias: bool = False,
    dtypes: Sequence[str] = ("float32", "float32"),
) -> MatmulPlan:
    """Return the plan of a batch of products.

    Parameters
    ----------
    product : Matmul
        The products.
    cpu : CPU
        The processor.
    way : str, optional
        One of :data:`relax_grad.cpu.kernel.matmul.matmul.WAYS`. By default, it is chosen.
    adds_bias : bool
        Whether a bias is added.
    dtypes : Sequence[str]
        The dtypes in which A and B are stored.

    Raises
    ------
    ValueError
        If the product does not allow the way.
    """
    check_way(product, way, adds_bias)
    if is_one(product.columns) and not is_one(product.rows):
        own = _plan_of_rows(product.turned(), cpu, way, adds_bias, dtypes[::-1])
        return replace(own, swaps=True)
    turns = way == "turned"
    if way is None:
        turns = _ways.is_transposed(product, cpu.tuning) and not adds_bias
    if turns:
        return MatmulPlan(product, cpu, "turned", transposed=_transposed(product, cpu, dtypes))
    return _plan_of_rows(product, cpu, way, adds_bias, dtypes)


def check_way(product: Matmul, way: str | None, adds_bias: bool) -> None:
    """Raise an error if a product does not allow a way."""
    if way is not None and (not product.allows(way) or (way == "turned" and adds_bias)):
        with_bias = " with a bias" if adds_bias else ""
        raise ValueError(f"{product}{with_bias} does not allow {way!r}")


def _transposed(product: Matmul, cpu: CPU, dtypes: Sequence[str]) -> TransposedPlan:
    limits, lanes, rows = cpu.tuning.transposed, cpu.lanes, product.rows
    way = _ways.way_of_transposed(product, cpu.tuning)
    inner = _plan_of_rows(product.turned(), cpu, way, False, dtypes[::-1])
    most = max(limits.task_vectors, ceil_div(ceil_div(rows, lanes), cpu.cores)) * lanes
    size = product.batch * (rows * product.columns)
    return TransposedPlan(inner, most, ceil_div(rows, most), size <= limits.one_thread)


def _plan_of_rows(
    product: Matmul, cpu: CPU, way: str | None, adds_bias: bool, dtypes: Sequence[str]
) -> MatmulPlan:
    """Return the plan of products whose factors keep their places."""
    tuning = cpu.tuning
    most = _ways.most_rows_in_place(product, tuning)
    way = way or _way_of_rows(product, most)
    is_packed = way == "packed"
    is_small = _ways.is_in_one_thread(product, tuning, is_packed)
    # B that is read in place is divided by its columns.
    is_small |= not is_packed and _ways.is_undivided(product, tuning)
    own = replace(cpu, cores=1) if is_small else cpu
    is_half = set(dtypes) == {"bfloat16"}
    tiles = cpu.tiles and is_half
    pairs = cpu.bfloat16 and is_half and not tiles
    in_place = packed = None
    if way != "packed":
        in_place = in_place_plan(product, own)
    if way != "few rows":
        packed = packed_plan(
            Tiled.of(product) if tiles else Pairs.of(product) if pairs else product,
            own,
            divides_depth=not is_small and not adds_bias,
            copies_a=dtypes[0] == "float16",  # see halves.widens_slowly
        )
    most = min(most, tuning.ways.symbolic_rows) if way == "at run time" else most
    return MatmulPlan(
        product,
        own,
        way,
        swaps=False,
        most_rows=most,
        in_one_thread=is_small,
        pairs=pairs,
        tiles=tiles,
        in_place=in_place,
        packed=packed,
    )


def _way_of_rows(product: Matmul, most: int) -> str:
    """Return the way for products whose factors keep their places."""
    if isinstance(product.rows, int):
        return "few rows" if product.rows <= most else "packed"
    is_fixed = product.transpose_a or not isinstance(product.columns, int)
    return "packed" if is_fixed else "at run time"


def in_place_plan(product: Matmul, cpu: CPU) -> InPlacePlan:
    """Return the plan of products that read B in place. Threads share one product, or a batch."""
    cores = cpu.cores if is_one(product.batch) else 1
    height, vectors = _ways.in_place_tile(product, cpu.tuning, cores)
    prefetch = cpu.tuning.prefetch
    ahead = prefetch.steps if height >= prefetch.in_place_rows else 0
    return InPlacePlan(product, cpu.lanes, height, vectors, ahead)


def packed_plan(
    product: Matmul,
    cpu: CPU,
    *,
    divides_depth: bool = False,
    is_stored: bool = True,
    copies_a: bool = False,
) -> PackedPlan:
    """Return the plan of products whose B is packed.

    Parameters
    ----------
    product : Matmul
        The products; of pairs, if bfloat16 is multiplied in pairs.
    cpu : CPU
        The processor.
    divides_depth : bool
        Whether parts of k may be summed apart.
    is_stored : bool
        Whether C is stored; otherwise, strips of it are consumed.
    copies_a : bool
        Whether tasks copy their rows of A in any case.
    """
    is_tiled = isinstance(product, Tiled)
    by_rows = is_stored and not is_tiled and _ways.writes_rows(product, cpu.tuning)
    tile = _Tile.of(product, cpu, by_rows=by_rows, divides_depth=divides_depth)
    division = _Division.of(tile, by_rows=by_rows, is_stored=is_stored)
    reading, ahead_a, ahead_b = _copies(product, cpu.tuning, copies_a)
    tuning = cpu.tuning
    c_bytes = 4 * product.rows * product.columns
    is_small = _is_at_most(c_bytes, tuning.caches.result - 1)
    return PackedPlan(
        *(product, cpu.lanes, cpu.cores, tile.height, tile.vectors, tuning.tiles, by_rows),
        *(tile.stretch, tile.parts, tile.part, tile.strips, tile.panels),
        *(division.largest, division.copied, division.tasks, division.shares),
        *(division.packs_late, reading, ahead_a, ahead_b),
        is_near=_is_at_most(4 * product.columns * product.depth, tuning.caches.factor),
        prefetches=division.prefetches,
        spreads=tuning.prefetch.spreads and not (is_small or by_rows),
        steals_loops=_ways.nanoseconds(replace(product, batch=1), tuning) >= tuning.tasks.short_ns,
    )


@dataclass(frozen=True)
class _Tile:
    """The tile of a product whose B is packed, its stretches, and its parts of k."""

    product: Matmul
    cpu: CPU
    height: int
    vectors: int
    stretch: int
    parts: int
    part: Extent

    @staticmethod
    def of(product: Matmul, cpu: CPU, *, by_rows: bool, divides_depth: bool) -> _Tile:
        if isinstance(product, Tiled):
            return _Tile._of_tiles(product, cpu, divides_depth=divides_depth)
        tuning, depth = cpu.tuning, product.depth
        most, vectors = _ways.product_tile(product, tuning, by_rows=by_rows)
        height = equal_height(product.rows, most)
        size = (height, vectors * cpu.lanes)
        parts = _tasks.parts_of_depth(product, tuning, size) if divides_depth else 1
        is_converted = isinstance(product, Pairs)
        stretch = _ways.stretch_of(depth, tuning, vectors, parts=parts, is_converted=is_converted)
        if parts == 1:
            return _Tile(
                product, cpu, height, vectors=vectors, stretch=stretch, parts=1, part=depth
            )
        part = stretch * ceil_div(ceil_div(depth, stretch), parts)
        return _Tile(
            product,
            cpu,
            height,
            vectors=vectors,
            stretch=stretch,
            parts=ceil_div(depth, part),
            part=part,
        )

    @staticmethod
    def _of_tiles(product: Tiled, cpu: CPU, *, divides_depth: bool) -> _Tile:
        """Return the tile of a product by tiles of the processor (AMX), and whole steps of these in
        each stretch."""
        rows, columns, depth = product.rows, product.columns, product.depth
        height = ROWS if not isinstance(rows, int) or rows > ROWS // 2 else ROWS // 2
        vectors = 1 if isinstance(columns, int) and columns <= cpu.lanes else 2
        size = (height, vectors * cpu.lanes)
        stretch, most = cpu.tuning.tiles.unit_depth, cpu.tuning.tiles.unit_depth
        if isinstance(depth, int):
            parts = ceil_div(depth, most)
            stretch = ceil_div(ceil_div(depth, max(parts, 1)), STEPS) * STEPS or STEPS
        parts = _tasks.parts_of_depth(product, cpu.tuning, size) if divides_depth else 1
        if parts == 1:
            return _Tile(
                product, cpu, height, vectors=vectors, stretch=stretch, parts=1, part=depth
            )
        part = stretch * ceil_div(ceil_div(depth, stretch), parts)
        return _Tile(
            product,
            cpu,
            height,
            vectors=vectors,
            stretch=stretch,
            parts=ceil_div(depth, part),
            part=part,
        )

    @property
    def size(self) -> tuple[int, int]:
        """The rows of a strip, and the columns of a panel."""
        return self.height, self.vectors * self.cpu.lanes

    @property
    def strips(self) -> Extent:
        return ceil_div(self.product.rows, self.height)

    @property
    def panels(self) -> Extent:
        return ceil_div(self.product.columns, self.size[1])


@dataclass(frozen=True)
class _Division:
    """The division of a product among threads: fields of :class:`PackedPlan`."""

    largest: tuple[int, int]
    copied: tuple[int, int]
    tasks: tuple[int, int] | None
    shares: _tasks.Shares | None
    packs_late: bool
    prefetches: bool | None

    @staticmethod
    def of(tile: _Tile, *, by_rows: bool, is_stored: bool) -> _Division:
        product, tuning, counts = tile.product, tile.cpu.tuning, (tile.strips, tile.panels)
        largest, copied = _tasks.limits(tuning, tile.size, product.depth, writes_rows=by_rows)
        if isinstance(product, Tiled):
            # Their rows of A are read in place over a whole stretch, and may take twice the memory.
            largest = _tasks.fitting(tuning, tile.height, ceil_div(tile.stretch, 2)), largest[1]
        packs_late = is_stored and (is_one(product.batch) or not product.shared_b)
        if not all(isinstance(count, int) for count in counts):
            prefetches = None if is_stored else False
            return _Division(
                largest, copied, None, shares=None, packs_late=packs_late, prefetches=prefetches
            )
        steals = is_stored and not by_rows
        shares = _shares(tile, largest) if steals else None
        if shares is None:
            tasks = _divided(tile, largest, copied)
            packs_late &= _packs_late(tile, tasks, by_rows=by_rows)
        else:
            tasks = shares.blocks(tile.cpu.cores)
        most, _ = _tasks.largest_of(counts, tasks)
        prefetches = is_stored and most >= tuning.prefetch.strips
        return _Division(
            largest, copied, tasks, shares=shares, packs_late=packs_late, prefetches=prefetches
        )


def _shares(tile: _Tile, largest: tuple[int, int]) -> _tasks.Shares | None:
    """Return the parts that threads steal from each other, if they are less work than tasks.

    That was not measured with pairs of bfloat16.
    """
    product, cpu = tile.product, tile.cpu
    is_single = is_one(product.batch) and isinstance(product.depth, int)
    if tile.parts > 1 or not is_single or isinstance(product, Pairs):
        return None
    resident = _tasks.fitting(cpu.tuning, tile.size[1], tile.stretch)
    sizes = tile.strips, tile.panels, largest, cpu.cores, tile.size
    return _tasks.shares_of(*sizes, resident, cpu.tuning.tasks)


def _divided(
    tile: _Tile, largest: tuple[int, int], copied: tuple[int, int]
) -> tuple[Extent, Extent]:
    cores = ceil_div(tile.cpu.cores, tile.parts)
    return _tasks.divide(
        tile.strips, tile.panels, largest, cores=cores, tile=tile.size, copied=copied
    )


def _packs_late(tile: _Tile, tasks: tuple[Extent, Extent], *, by_rows: bool) -> bool:
    """Tell whether it takes less time that each task packs the panels that it reads."""
    product, cpu = tile.product, tile.cpu
    block = _tasks.largest_of((tile.strips, tile.panels), tasks)
    if not _tasks.packs_by_tasks(tile.strips, block, tile.size, product.depth, cpu.tuning):
        return False
    return by_rows or not _tasks.packs_again(product, tile.strips, block, cpu.cores, cpu.tuning)


def _copies(product: Matmul, tuning: Tuning, copies_a: bool) -> tuple[str, int, int]:
    """Return how A is read, and the steps that A and B are prefetched before they are copied."""
    if isinstance(product, Tiled):
        return "in place" if product.is_in_place else "copied", 0, 0
    if isinstance(product, Pairs):
        return "strips" if product.transpose_a else "copied", 0, 0
    reading = _ways.reading_of_a(product, tuning, copies=copies_a)
    ahead_b = _ways.steps_ahead_of_copy(tuning, product.columns, product.depth)
    if reading != "strips":
        return reading, 0, ahead_b
    return reading, _ways.steps_ahead_of_copy(tuning, product.rows, product.depth), ahead_b


def _is_at_most(size: Extent, most: int) -> bool:
    """Tell whether a size is known and small."""
    return isinstance(size, int) and size <= most
