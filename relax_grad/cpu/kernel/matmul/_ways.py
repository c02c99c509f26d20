"""The choices between the ways to compute a matrix product, from its sizes and a processor's
:class:`~relax_grad.cpu.tuning.Tuning`.

Each function answers one question. :mod:`relax_grad.cpu.kernel.matmul.plan` asks each of them once.
"""

from __future__ import annotations

from math import inf

from ...limits import Crossover
from ...tuning import Tuning
from ..language.builder import Extent, ceil_div
from ..language.extents import LINE
from .product import Matmul, is_one
from .tile import equal_height


def most_rows_in_place(product: Matmul, tuning: Tuning) -> int:
    """Return the number of rows up to which packing B costs more than it saves."""
    ways = tuning.ways
    if not product.transpose_b:
        return _most_rows_of_rows(product, tuning)
    # Summing the lanes of a vector takes about as long as that many multiplications.
    if product.transpose_a:
        return 1
    depth = product.depth if isinstance(product.depth, int) else tuning.tiles.depth
    columns, lanes = product.columns, tuning.lanes
    if not isinstance(columns, int) or columns >= ways.narrow or columns % lanes == 0:
        return max(4, min(ways.dot_rows, depth // 16))
    # Panels would have zeros in part of their lanes. Each tile of columns reads all of A.
    most = max(4, depth // 8 if depth < 128 else ways.masked_size // depth)
    if ways.filled_rows is None:
        return most
    filled = columns / (ceil_div(columns, lanes) * lanes)
    return min(most, max(4, int(ways.filled_rows / filled**3)))


def _most_rows_of_rows(product: Matmul, tuning: Tuning) -> int:
    """Return :func:`most_rows_in_place` of a B that is read in rows."""
    if not isinstance(product.columns, int):
        return tuning.ways.in_place_rows
    fitting = (each.rows for each in tuning.ways.in_place if _fits(each, product, tuning))
    return next(fitting, tuning.ways.in_place_rows)


def _fits(limit: Crossover, product: Matmul, tuning: Tuning) -> bool:
    """Tell whether a limit holds for a product with a B of known columns."""
    columns = product.columns
    steps = product.depth if isinstance(product.depth, int) else 0  # 0: unknown
    is_crowded = steps >= tuning.tiles.depth and share_sets(columns, tuning)
    least, most = (number * tuning.lanes for number in limit.vectors)
    return (
        4 * columns * steps > limit.over_bytes
        and limit.steps[0] <= steps <= limit.steps[1]
        and least <= columns <= most
        and (is_crowded or not limit.is_crowded)
        and not (limit.is_plain and product.transpose_a)
    )


def nanoseconds(product: Matmul, tuning: Tuning) -> float:
    """Return an estimate of the time that one thread takes, infinite for symbolic extents."""
    if not product.is_static:
        return inf
    batch, rows, columns, depth = product.batch, product.rows, product.columns, product.depth
    width = columns if product.transpose_b else filled(columns, tuning.lanes)
    size = 4 * depth * (rows + columns)
    lanes = tuning.tasks.lane_ns * tuning.lanes
    return batch * max(rows * width * depth / lanes, size / tuning.caches.bytes_per_ns)


def is_in_one_thread(product: Matmul, tuning: Tuning, is_packed: bool = True) -> bool:
    """Tell whether one thread computes a product, because waking others costs more."""
    columns, tasks = product.columns, tuning.tasks
    is_narrow = isinstance(columns, int) and columns <= tuning.tiles.largest[1] * tuning.lanes
    limit = tasks.one_panel_ns if is_packed and is_narrow else tasks.one_thread_ns
    return nanoseconds(product, tuning) <= limit


def is_undivided(product: Matmul, tuning: Tuning) -> bool:
    """Tell whether a B that is read in place is a single vector: threads divide its columns."""
    is_known = is_one(product.batch) and isinstance(product.rows, int)
    columns = product.columns
    return is_known and isinstance(columns, int) and columns <= tuning.lanes


def writes_rows(product: Matmul, tuning: Tuning) -> bool:
    """Tell whether tiles are computed strip by strip, and not panel by panel.

    Sums of few steps take less time than their stores. The caches write rows of C faster than short
    parts of many rows. Vectors of a whole cache line must not begin within one, unless tiles are
    wide.
    """
    columns, depth, ways = product.columns, product.depth, tuning.ways
    if not product.is_static or depth > ways.rows_steps:
        return False
    if product.transpose_b and product.rows < ways.rows_of_packed * depth:
        return False
    is_aligned = ways.rows_begin_anywhere or columns % LINE == 0
    return is_aligned and columns > ways.rows_vectors * tuning.lanes


def product_tile(
    product: Matmul, tuning: Tuning, *, by_rows: bool | None = None
) -> tuple[int, int]:
    """Return the most rows and the vectors of the tile of a matrix product.

    Of few columns, the vectors of a panel divide them, if possible. ``by_rows`` tells whether rows
    of C are written one after the other; by default, :func:`writes_rows` does.
    """
    columns, lanes, tiles = product.columns, tuning.lanes, tuning.tiles
    if not isinstance(columns, int):
        return tiles.largest
    if tiles.single is not None and columns <= lanes:
        return tiles.single[product.transpose_a], 1
    if tiles.wide is None or tiles.widest is None or columns <= 2 * lanes:
        return tiles.largest
    if writes_rows(product, tuning) if by_rows is None else by_rows:
        is_narrow = columns % LINE == 0 and product.depth <= tiles.narrow_steps
        return tiles.largest if is_narrow else tiles.widest
    divides = columns % (4 * lanes) == 0 and columns % (3 * lanes) > 0
    return tiles.widest if divides and columns < tiles.many_columns else tiles.wide


def stretch_of(
    depth: Extent,
    tuning: Tuning,
    vectors: int,
    *,
    parts: int = 1,
    multiple: int | None = None,
    is_converted: bool = False,
) -> int:
    """Return the steps of k in a stretch; the last one may have fewer.

    Parameters
    ----------
    depth : int or tirx.PrimExpr
        The extent of k.
    tuning : Tuning
        The values of the processor.
    vectors : int
        The vectors of a panel.
    parts : int
        The parts of k that are summed apart.
    multiple : int, optional
        The number that divides the steps of several stretches: by default, the steps of a round.
    is_converted : bool
        Whether panels hold pairs of bfloat16 or quantized weights.
    """
    tiles, longest = tuning.tiles, tuning.tiles.depth
    if vectors == 3:
        longest = tiles.wide_converted_depth if is_converted else tiles.wide_depth
    if not isinstance(depth, int):
        return longest
    if depth <= tiles.depth:
        return depth
    number = parts * ceil_div(depth, parts * longest)
    multiple = multiple or tiles.round
    return ceil_div(ceil_div(depth, number), multiple) * multiple


def reading_of_a(product: Matmul, tuning: Tuning, *, copies: bool = False) -> str:
    """Return how tiles read A, as a key of :data:`relax_grad.cpu.kernel.matmul._factor.READERS`.

    Parameters
    ----------
    product : Matmul
        The product.
    tuning : Tuning
        The values of the processor.
    copies : bool
        Whether A is copied in any case: its elements take long to widen one by one.
    """
    if product.transpose_a:
        return "in place" if not copies and is_read_across(product, tuning) else "strips"
    extents = (product.rows, product.columns, product.depth)
    least = tuning.ways.transposed_copy
    if least is not None and all(map(_is_at_least, extents, least)):
        return "transposed"
    is_few = isinstance(product.columns, int) and product.columns <= tuning.ways.copied_columns
    copies = copies or (share_sets(product.depth, tuning) and not is_few)
    return "copied" if copies else "in place"


def is_read_across(product: Matmul, tuning: Tuning) -> bool:
    """Tell whether a transposed A is multiplied by so few columns that copying it costs more than
    the distance of its steps."""
    rows, columns, ways = product.rows, product.columns, tuning.ways
    if not (isinstance(rows, int) and isinstance(columns, int)) or rows > ways.across_rows:
        return False
    if share_sets(rows, tuning):
        vectors, most, most_rows = ways.crowded_across
        return vectors * tuning.lanes < columns <= most and rows <= most_rows
    return columns <= ways.across_columns


def steps_ahead_of_copy(tuning: Tuning, stride: Extent, steps: Extent) -> int:
    """Return the steps of k that rows of a factor are prefetched before they are copied: 0 if
    caches near the core hold it, or its rows are short, as the processor prefetches these."""
    size = stride * steps
    is_near = isinstance(size, int) and 4 * size <= tuning.caches.factor
    is_short = isinstance(stride, int) and stride < tuning.prefetch.least_apart
    return 0 if is_near or is_short else tuning.prefetch.steps


def is_transposed(product: Matmul, tuning: Tuning) -> bool:
    """Tell whether the product of the transposed factors takes less time, with the transposition of
    its result."""
    limits = tuning.transposed
    if not limits.is_measured or not product.allows("turned") or product.batch != 1:
        return False
    rows, columns, depth = product.rows, product.columns, product.depth
    is_small = columns <= limits.columns and rows * columns <= limits.elements
    if not is_small or rows < limits.rows or depth < limits.steps:
        return False
    if product.transpose_a:
        return _is_faster_transposed(product, tuning)
    if not product.transpose_b:
        return columns <= limits.row_columns
    is_packed = rows > most_rows_in_place(product, tuning)
    return is_packed and columns <= min(limits.dot_columns, depth // limits.steps_of_column)


def _is_faster_transposed(product: Matmul, tuning: Tuning) -> bool:
    """Compare the times of a product with a transposed A, in columns of C."""
    limits, lanes = tuning.transposed, tuning.lanes
    rows, columns, depth = product.rows, product.columns, product.depth
    own, is_across = filled(columns, lanes), is_read_across(product, tuning)
    if is_across and own == limits.across_vectors * lanes:
        return False
    own = max(limits.least_columns, own) + (limits.read if is_across else limits.copied)
    is_few = columns <= most_rows_in_place(product.turned(), tuning)
    if is_few and way_of_transposed(product, tuning) is None:
        turned = (columns * limits.in_place) * filled(rows, lanes) / rows
    elif rows < limits.packed_rows:
        return False
    else:
        turned = (columns + limits.packed) * filled(rows, limits.packed_vectors * lanes) / rows
    turned += limits.transposition * filled(columns, lanes) / depth
    return turned < limits.gain * own


def way_of_transposed(product: Matmul, tuning: Tuning) -> str | None:
    """Return the way to compute the product of the transposed factors; None: by its sizes.

    Long sums are divided into stretches, as for the product itself, so that their errors are no
    larger.
    """
    is_long = product.transpose_a and product.depth > tuning.transposed.long_sum
    return "packed" if is_long else None


def in_place_tile(product: Matmul, tuning: Tuning, cores: int) -> tuple[int, int]:
    """Return the rows and vectors of a tile that reads B in place, or its columns if vectors run
    along k, such that tasks of a tile each keep all threads busy."""
    tiles, rows = tuning.tiles, product.rows
    # Strips of equal height allow the widest tile in each.
    height = equal_height(rows, tiles.in_place if isinstance(rows, int) else 4)
    # The vectors of B for a single row are operands of its multiply-adds, and take no registers.
    fitting = (tuning.registers - 1) // (height + 1)
    widest = tiles.in_place_vectors if height == 1 else min(tiles.in_place_vectors, fitting)
    if cores < 2 or not isinstance(product.columns, int):
        return height, widest
    vectors = ceil_div(product.columns, 1 if product.transpose_b else tuning.lanes)

    def most(width: int) -> int:
        """Return the operands and multiply-adds for each step, of the thread that has the most."""
        tiles_each = ceil_div(ceil_div(vectors, width), cores)
        return tiles_each * (height * width + height + width)

    return height, min(range(widest, 0, -1), key=most)


def share_sets(stride: Extent, tuning: Tuning) -> bool:
    """Tell whether rows of a stride, in elements, are known to share few sets of a first-level
    cache."""
    return isinstance(stride, int) and stride % tuning.caches.set_stride == 0


def filled(number: int, lanes: int) -> int:
    """Return the elements of whole vectors."""
    return ceil_div(number, lanes) * lanes


def _is_at_least(extent: Extent, least: int) -> bool:
    """Tell whether an extent is known and large."""
    return isinstance(extent, int) and extent >= least
