"""The division of a matrix product into tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx

from ...limits import Tasks
from ...tuning import GENERIC, Tuning
from ..language.builder import Extent, as_expr, computed, quotient
from .product import Matmul

#: The rows and columns of :func:`divide` that cost as much as the copies of a task.
_COPIED = GENERIC.tasks.copied


def largest_task(tuning: Tuning, tile: tuple[int, int], depth: Extent) -> tuple[int, int]:
    """Return the maximum number of strips and of panels of a task.

    Parameters
    ----------
    tuning : Tuning
        The values of the processor.
    tile : tuple[int, int]
        The rows of a strip, and the columns of a panel.
    depth : int or tirx.PrimExpr
        The extent of k.
    """
    deepest = tuning.tiles.depth
    steps = min(depth, deepest) if isinstance(depth, int) else deepest
    return fitting(tuning, tile[0], steps), max(1, tuning.tasks.columns // tile[1])


def limits(tuning: Tuning, tile: tuple[int, int], depth: Extent, *, writes_rows: bool) -> tuple:
    """Return ``largest`` and ``copied`` of :func:`divide`.

    Parameters
    ----------
    tuning, tile, depth
        As for :func:`largest_task`.
    writes_rows : bool
        Whether tasks write rows of C one after the other, and have few steps.
    """
    strips, panels = largest_task(tuning, tile, depth)
    tasks = tuning.tasks
    if not writes_rows:
        return (strips, panels), tasks.copied
    rows = min(tasks.copied[0], tasks.rows_of_step * depth)
    panels = max(panels, tuning.caches.read_again // depth // tile[1])
    return (strips, panels), (rows, tasks.columns_of_row)


def divide(
    strips: Extent,
    panels: Extent,
    largest: tuple[int, int],
    cores: int,
    tile: tuple[Extent, int],
    copied: tuple[int, int] = _COPIED,
) -> tuple[Extent, Extent]:
    """Return the number of tasks that the strips are divided among, and that the panels are; their
    product is about a multiple of the cores.

    A task packs the columns of B that it reads, and copies its rows of A. So the larger ones of
    both are divided, unless the others have more even halves. Of symbolic numbers, the code that
    computes the result is emitted.

    Parameters
    ----------
    strips, panels : int or tirx.PrimExpr
        The strips and panels of the product.
    largest : tuple[int, int]
        The maximum for a task.
    cores : int
        The number of threads that share the tasks.
    tile : tuple[int, int]
        The rows of a strip, and the columns of a panel.
    copied : tuple[int, int]
        The rows whose multiply-adds take as long as the packing of B, and the columns whose
        multiply-adds take as long as the copy of A.
    """
    rows, columns = _least(largest[0], strips), _least(largest[1], panels)
    halvings = (cores - 1).bit_length()
    # Halves that are rounded up may not double the number of tasks.
    for _ in range(halvings + (halvings > 1)):
        is_few = _up(strips, rows) * _up(panels, columns) < cores
        half_rows, half_columns = _up(rows, 2), _up(columns, 2)
        by_rows = _work(half_rows, columns, tile, copied) <= _work(rows, half_columns, tile, copied)
        rows, columns = (
            _select(is_few, _select(by_rows, half_rows, rows), rows),
            _select(is_few, _select(by_rows, columns, half_columns), columns),
        )
    # Each thread gets the same number of tasks, unless they are no multiple of the cores.
    down, across = _up(strips, rows), _up(panels, columns)

    def most(down: Extent, across: Extent) -> Extent:
        """Return the work of the threads that have the most: of symbolic numbers as float64, which
        does not overflow."""
        work = _work(_up(strips, down), _up(panels, across), tile, copied)
        tasks = _up(down * across, cores)
        if isinstance(work, int) and isinstance(tasks, int):
            return tasks * work
        return tirx.Cast("float64", as_expr(tasks)) * tirx.Cast("float64", as_expr(work))

    even_down = _least(_up(down, cores) * cores, strips)
    even_across = _least(_up(across, cores) * cores, panels)
    for other in ((even_down, across), (down, even_across)):
        is_less = most(*other) < most(down, across)
        down, across = _select(is_less, other[0], down), _select(is_less, other[1], across)
    return down, across


@dataclass(frozen=True)
class Shares:
    """Parts of a product that threads take from each other.

    Attributes
    ----------
    of_strips : bool
        Whether they are blocks of strips; otherwise, they are panels.
    items : int
        Their number.
    rounds : int
        The number of blocks of panels for which all strips are computed one after the other, or of
        blocks of strips for which all panels are.
    """

    of_strips: bool
    items: int
    rounds: int

    def blocks(self, cores: int) -> tuple[int, int]:
        """Return the number of blocks of strips and of panels.

        One factor stays in a cache for a block. The other block is what a thread takes, if these
        are strips, or the panels that it begins with.
        """
        return (self.items, self.rounds) if self.of_strips else (self.rounds, cores)


def shares_of(
    strips: int,
    panels: int,
    largest: tuple[int, int],
    cores: int,
    tile: tuple[int, int],
    most_panels: int,
    limits: Tasks,
) -> Shares | None:
    """Return the parts that each thread gets some of, and takes from other threads when it has
    finished; or None if the tasks of :func:`divide` are less work.

    If they are panels, each thread copies all of A; if they are blocks of strips, each packs all
    panels.

    Parameters
    ----------
    strips, panels, largest, cores, tile
        As for :func:`divide`.
    most_panels : int
        The most panels that a thread packs before it reads them.
    limits : Tasks
        The limits of work stealing.
    """
    if cores < 2:
        return None
    tasks = divide(strips, panels, largest, cores, tile)
    each = largest_of((strips, panels), tasks)
    least, chosen = limits.steal_work * _up(math.prod(tasks), cores) * _work(*each, tile), None
    blocks = cores * _up(max(strips // limits.steal_strips, _up(strips, largest[0])), cores)
    ways = [
        (Shares(False, panels, _up(strips, largest[0])), limits.steal_panels, 1.0),
        (
            Shares(True, blocks, _up(panels, most_panels)),
            limits.steal_blocks,
            limits.steal_strips_time,
        ),
    ]
    for shares, number, time in ways:
        if shares.items < number * cores:
            continue
        parts = (cores, shares.rounds) if shares.of_strips else (shares.rounds, cores)
        each = largest_of((strips, panels), parts)
        work = time * shares.rounds * _work(*each, tile)
        if work <= least:
            least, chosen = work, shares
    return chosen


def fitting(tuning: Tuning, size: int, steps: int) -> int:
    """Return how many strips or panels of a size a second-level cache holds beside others, over
    some steps of k."""
    return max(1, tuning.caches.task // (4 * size * steps))


def largest_of(counts: tuple, tasks: tuple) -> tuple[Extent, Extent]:
    """Return the strips and panels of the largest task.

    Parameters
    ----------
    counts : tuple
        All strips and panels.
    tasks : tuple
        The numbers of tasks that share them, which :func:`divide` returns.
    """
    (strips, panels), (down, across) = counts, tasks
    return _up(strips, down), _up(panels, across)


def parts_of_depth(product: Matmul, tuning: Tuning, tile: tuple[int, int]) -> int:
    """Return the number of parts of k that are summed separately, each by separate threads.

    Threads that share k copy their parts of A and B alone, and have equal work even if strips and
    panels are few. The parts depend on the sizes alone, not on the number of threads.

    Parameters
    ----------
    product : Matmul
        The product.
    tuning : Tuning
        The values of the processor.
    tile : tuple[int, int]
        The rows of a strip, and the columns of a panel.
    """
    depth, deepest, tasks = product.depth, tuning.tiles.depth, tuning.tasks
    if not product.is_static or product.batch != 1 or depth <= deepest:
        return 1
    strips, panels = _up(product.rows, tile[0]), _up(product.columns, tile[1])

    def division(cores: int) -> tuple[tuple[int, int], int]:
        """Return the strips and panels of a task, and the work of all tasks for each step."""
        down, across = divide(strips, panels, largest_task(tuning, tile, depth), cores, tile)
        each = largest_of((strips, panels), (down, across))
        return each, down * across * _work(*each, tile)

    # Two threads gain less than more of them do.
    (each, divided), (_, whole) = division(2), division(1)
    if packs_by_tasks(strips, each, tile, depth, tuning):
        added = tasks.added_ns * tasks.lane_ns * tuning.lanes / depth
        if depth < 2 * deepest or divided / 2 < tasks.gain * (whole / 2 + added):
            return 1
    return min(tasks.parts, 2 ** max(1, ((depth // (2 * deepest)).bit_length() + 1) // 2))


def packs_by_tasks(
    strips: int, each: tuple[int, int], tile: tuple[int, int], depth: Extent, tuning: Tuning
) -> bool:
    """Tell whether each task packs the panels that it reads, instead of a parallel region before.

    Parameters
    ----------
    strips : int
        The strips of the product.
    each : tuple[int, int]
        The strips and panels of a task.
    tile : tuple[int, int]
        The rows of a strip, and the columns of a panel.
    depth : int or tirx.PrimExpr
        The extent of k.
    tuning : Tuning
        The values of the processor.
    """
    has_rows = each[0] >= strips or each[0] * tile[0] >= tuning.tasks.late_rows
    steps = depth if isinstance(depth, int) else tuning.tiles.depth
    return has_rows or 4 * steps * each[1] * tile[1] <= tuning.tasks.late_bytes


def packs_again(
    product: Matmul, strips: int, each: tuple[int, int], cores: int, tuning: Tuning
) -> bool:
    """Tell whether threads would pack the same panels for several tasks, and all panels are few
    enough to pack them once, before the tasks.

    Parameters
    ----------
    product : Matmul
        The product, with known columns.
    strips, each
        As for :func:`packs_by_tasks`.
    cores : int
        The number of threads.
    tuning : Tuning
        The values of the processor.
    """
    size = 4 * product.columns * product.depth
    is_small = isinstance(size, int) and size <= tuning.tasks.early_bytes
    return is_small and _up(strips, each[0]) >= 2 * cores


def _work(
    rows: Extent,
    columns: Extent,
    tile: tuple[Extent, int],
    copied: tuple[int, int] = _COPIED,
) -> Extent:
    """Return the work of a task of some strips and panels, in multiply-adds for each step."""
    return (rows * tile[0] + copied[0]) * (columns * tile[1] + copied[1])


def _least(most: Extent, number: Extent) -> Extent:
    """Return the smaller number, at least 1."""
    if isinstance(most, int) and isinstance(number, int):
        return max(1, min(most, number))
    return computed(tirx.max(as_expr(1), tirx.min(as_expr(most), as_expr(number))))


def _up(number: Extent, size: Extent) -> Extent:
    """Return number / size rounded up, at least 1."""
    if isinstance(number, int) and isinstance(size, int):
        return max(1, -(-number // size))
    return computed(tirx.max(as_expr(1), quotient(number + size - 1, size)))


def _select(condition: bool | tirx.PrimExpr, then: Extent, otherwise: Extent) -> Extent:
    if isinstance(condition, bool):
        return then if condition else otherwise
    return computed(tirx.Select(condition, as_expr(then), as_expr(otherwise)))
