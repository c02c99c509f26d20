"""The division of a matrix product into tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx

from ..target import CPU
from ._product import DEPTH, PER_LANE_NS, Matmul
from ._tile import tile_size
from .builder import Extent, as_expr, computed, const, quotient

#: Bytes of A that one task reads, about half of a second-level cache: processors with vectors of 16
#: elements have at least 1 MB, with few exceptions.
_TASK_BYTES, _TASK_BYTES_OF_LARGE_CACHES = 384 * 1024, 544 * 1024

#: Columns of B that one task reads. More columns save copies of A.
_TASK_COLUMNS = 2048


#: The rows of A whose multiply-adds take as long as the packing of B, and the columns of B whose
#: multiply-adds take as long as the copy of A.
_COPIED = (24, 24)

#: The rows of C that take as long as the packing of a step of B, if rows of C are written one after
#: the other, and the columns that take as long as what a row costs. Threads that write parts of the
#: same rows take up to 1.3 times as long.
_ROWS_OF_STEP, _COLUMNS_OF_ROW = 2, 128

#: The elements of panels that each strip reads, and that stay in a second-level cache.
_READ_AGAIN = 2**17

#: The rows of a task from which its share of packing B costs no more than packing all panels
#: before.
_ROWS_OF_LATE = 64

#: The bytes of the panels of a task up to which packing them takes no longer than a parallel region
#: that packs all panels before.
_BYTES_OF_LATE = 256 * 1024

#: The bytes of B up to which it is packed as a whole, to save packing panels again.
_BYTES_OF_EARLY = 2**25

#: The most parts of k. Their number grows as the square root of the steps: more parts have more
#: sums.
_MOST_PARTS = 8

#: The nanoseconds that adding the sums of the parts takes, with a parallel region of its own.
_ADDED_NS = 1000

#: The work that is saved from which parts of k take less time, relative to the work left.
_GAIN = 1.08

#: The least panels of each thread, and the work relative to that of tasks, up to which threads take
#: panels from each other.
_LEAST_SHARED, _MORE = 2, 1.1

#: The strips that threads take from each other at once: a panel is read once for all of them. The
#: least blocks of them for each thread.
_STRIPS_OF_ITEM, _LEAST_BLOCKS = 8, 2

#: The time of a block of strips relative to the same work for panels: its panels are read from a
#: second-level cache.
_STRIPS_TIME = 1.08

#: Nanoseconds of work up to which one thread computes a product: a parallel region takes 400
#: to 5000.
ONE_THREAD_NS = 4000

#: The same, if B is a single panel: threads share the rows, and each packs all of B. On Intel's
#: processors, two threads take 0.65 to 0.8 of the time there too.
_ONE_THREAD_NS_OF_ONE_PANEL = 11_000


def is_in_one_thread(product: Matmul, cpu: CPU, is_packed: bool = True) -> bool:
    """Tell whether one thread computes a product, because waking others costs more."""
    columns = product.columns
    is_narrow = isinstance(columns, int) and columns <= tile_size(cpu)[1] * cpu.lanes
    is_narrow &= not cpu.intel
    limit = _ONE_THREAD_NS_OF_ONE_PANEL if is_packed and is_narrow else ONE_THREAD_NS
    return product.nanoseconds(cpu) <= limit


def largest_task(cpu: CPU, tile: tuple[int, int], depth: Extent) -> tuple[int, int]:
    """Return the maximum number of strips and of panels of a task.

    Parameters
    ----------
    cpu : CPU
        The target CPU.
    tile : tuple[int, int]
        The rows of a strip, and the columns of a panel.
    depth : int or tirx.PrimExpr
        The extent of k.
    """
    steps = min(depth, DEPTH) if isinstance(depth, int) else DEPTH
    return _fitting(cpu, tile[0], steps), max(1, _TASK_COLUMNS // tile[1])


def limits(cpu: CPU, tile: tuple[int, int], depth: Extent, *, writes_rows: bool) -> tuple:
    """Return ``largest`` and ``copied`` of :func:`divide`.

    Parameters
    ----------
    cpu, tile, depth
        As for :func:`largest_task`.
    writes_rows : bool
        Whether tasks write rows of C one after the other, and have few steps.
    """
    strips, panels = largest_task(cpu, tile, depth)
    if not writes_rows:
        return (strips, panels), _COPIED
    rows = min(_COPIED[0], _ROWS_OF_STEP * depth)
    return (strips, max(panels, _READ_AGAIN // depth // tile[1])), (rows, _COLUMNS_OF_ROW)


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


def shares_of(
    strips: int,
    panels: int,
    largest: tuple[int, int],
    cores: int,
    tile: tuple[int, int],
    most_panels: int,
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
    """
    if cores < 2:
        return None
    tasks = divide(strips, panels, largest, cores, tile)
    each = largest_of((strips, panels), tasks)
    least, chosen = _MORE * _up(math.prod(tasks), cores) * _work(*each, tile), None
    blocks = cores * _up(max(strips // _STRIPS_OF_ITEM, _up(strips, largest[0])), cores)
    ways = [
        (Shares(False, panels, _up(strips, largest[0])), _LEAST_SHARED, 1.0),
        (Shares(True, blocks, _up(panels, most_panels)), _LEAST_BLOCKS, _STRIPS_TIME),
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


def most_panels_of(cpu: CPU, width: int, stretch: int) -> int:
    """Return the most panels of a width that stay in a second-level cache over a stretch of k."""
    return _fitting(cpu, width, stretch)


def _fitting(cpu: CPU, size: int, steps: int) -> int:
    """Return how many strips or panels of a size a second-level cache holds beside others, over
    some steps of k."""
    limit = _TASK_BYTES_OF_LARGE_CACHES if cpu.lanes > 8 else _TASK_BYTES
    return max(1, limit // (4 * size * steps))


def range_of(task, tasks: Extent, number: Extent) -> tuple:
    """Return the first of the strips or panels of a task, and the one after its last one.

    Tasks have the same number of them, but the last ones have one more, if there are not as many
    for each: the last strip or panel of a product may be partial.

    Parameters
    ----------
    task : int or tirx.PrimExpr
        The number of the task.
    tasks : int or tirx.PrimExpr
        The number of tasks.
    number : int or tirx.PrimExpr
        All strips or panels.
    """
    each = quotient(number, tasks)
    equal = tasks - (number - each * tasks)
    if isinstance(task, int):
        first, stop = (at * each + max(0, at - equal) for at in (task, task + 1))
        return first, stop
    # No product of task and number: it could exceed 2**31.
    first, stop = (at * each + tirx.max(const(0), at - equal) for at in (task, task + 1))
    return computed(first), computed(stop)


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


def parts_of_depth(product: Matmul, cpu: CPU, tile: tuple[int, int]) -> int:
    """Return the number of parts of k that are summed apart, each by threads of its own.

    Threads that share k copy their parts of A and B alone, and have equal work even if strips and
    panels are few. The parts depend on the sizes alone, not on the number of threads.

    Parameters
    ----------
    product : Matmul
        The product.
    cpu : CPU
        The target CPU.
    tile : tuple[int, int]
        The rows of a strip, and the columns of a panel.
    """
    depth = product.depth
    if not product.is_static or product.batch != 1 or depth <= DEPTH:
        return 1
    strips, panels = _up(product.rows, tile[0]), _up(product.columns, tile[1])

    def division(cores: int) -> tuple[tuple[int, int], int]:
        """Return the strips and panels of a task, and the work of all tasks for each step."""
        down, across = divide(strips, panels, largest_task(cpu, tile, depth), cores, tile)
        each = largest_of((strips, panels), (down, across))
        return each, down * across * _work(*each, tile)

    # Two threads gain less than more of them do.
    (each, divided), (_, whole) = division(2), division(1)
    if packs_by_tasks(strips, each, tile, depth):
        added = _ADDED_NS * PER_LANE_NS * cpu.lanes / depth
        if depth < 2 * DEPTH or divided / 2 < _GAIN * (whole / 2 + added):
            return 1
    return min(_MOST_PARTS, 2 ** max(1, ((depth // (2 * DEPTH)).bit_length() + 1) // 2))


def packs_by_tasks(strips: int, each: tuple[int, int], tile: tuple[int, int], depth: Extent):
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
    """
    has_rows = each[0] >= strips or each[0] * tile[0] >= _ROWS_OF_LATE
    steps = depth if isinstance(depth, int) else DEPTH
    return has_rows or 4 * steps * each[1] * tile[1] <= _BYTES_OF_LATE


def packs_again(product: Matmul, strips: int, each: tuple[int, int], cores: int) -> bool:
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
    """
    size = 4 * product.columns * product.depth
    is_small = isinstance(size, int) and size <= _BYTES_OF_EARLY
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


def _select(condition, then: Extent, otherwise: Extent) -> Extent:
    if isinstance(condition, bool):
        return then if condition else otherwise
    return computed(tirx.Select(condition, as_expr(then), as_expr(otherwise)))
