"""Matrix products of few columns, as the products of the transposed factors.

Few columns fill a part of the vectors of a tile, and a transposed first factor is copied for them
alone. The product of the second and the first factor, both transposed, has as many columns as the
first factor has rows, and reads it as vectors. Its result is transposed at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from ..target import CPU
from . import builder as b
from ._factor import is_read_across
from ._product import MOST_STEPS, Matmul
from .builder import Vectors, bind, ceil_div, const

#: The elements of C up to which one thread transposes them.
_FEW_ELEMENTS = 16 * 1024

#: The rows of C that a task transposes at least, in vectors.
_VECTORS_OF_TASK = 4

#: The most columns of a product that is turned, and the least rows and steps.
_MOST_COLUMNS, _LEAST_ROWS, _LEAST_STEPS = 128, 8, 24

#: The most elements of C, which the workspace of the kernel holds once more.
_MOST_ELEMENTS = 2**20

#: The least elements of a vector: turned products were measured with AVX2 and AVX-512.
_LEAST_LANES = 8

#: The most columns, if the first factor is not transposed: with AVX-512 and a second factor in
#: rows; and with one that is transposed too, for at least so many steps for each column.
_FEW_IN_ROWS, _FEW_DOTS, _STEPS_OF_COLUMN = 3, 12, 30

#: Columns whose multiply-adds take as long as copying a transposed first factor, and as reading it
#: in place.
_COPIED, _READ = 18, 8

#: The vectors of the columns of a wide tile for Intel's processors, which reads the first factor in
#: place as fast as a turned product does.
_VECTORS_OF_INTEL = 3

#: Fewer columns take no less time: fewer sums do not hide the latency of multiply-adds.
_LEAST_COLUMNS = 16

#: Columns whose multiply-adds take as long as packing the first factor for the turned product; the
#: vectors of its panels; and the least rows of a factor that is packed.
_PACKED, _VECTORS, _LEAST_PACKED = 6, 2, 96

#: The time of a column of a product that reads the first factor in place.
_IN_PLACE = 1.3

#: The steps whose multiply-adds take as long as transposing C.
_STEPS_OF_TRANSPOSITION = 16

#: The share of the time that is left, from which a product is turned.
_GAIN = 0.9


def is_turned(product: Matmul, cpu: CPU) -> bool:
    """Tell whether the product of the transposed factors takes less time, with the transposition of
    its result."""
    if not product.allows("turned") or product.batch != 1 or product.columns > _MOST_COLUMNS:
        return False
    rows, columns, depth, lanes = product.rows, product.columns, product.depth, cpu.lanes
    if rows < _LEAST_ROWS or depth < _LEAST_STEPS or lanes < _LEAST_LANES:
        return False
    if rows * columns > _MOST_ELEMENTS:
        return False
    if not product.transpose_a:
        if not product.transpose_b:
            return lanes > 8 and columns <= _FEW_IN_ROWS
        is_packed = rows > product.most_few_rows(cpu)
        return is_packed and columns <= min(_FEW_DOTS, depth // _STEPS_OF_COLUMN)
    own, is_across = _filled(columns, lanes), is_read_across(product, cpu)
    if is_across and cpu.intel and own == _VECTORS_OF_INTEL * lanes:
        return False
    own = max(_LEAST_COLUMNS, own) + (_READ if is_across else _COPIED)
    if columns <= product.turned().most_few_rows(cpu) and way_of_turned(product) is None:
        turned = (columns * _IN_PLACE) * _filled(rows, lanes) / rows
    elif rows < _LEAST_PACKED:
        return False
    else:
        turned = (columns + _PACKED) * _filled(rows, _VECTORS * lanes) / rows
    turned += _STEPS_OF_TRANSPOSITION * _filled(columns, lanes) / depth
    return turned < _GAIN * own


def way_of_turned(product: Matmul) -> str | None:
    """Return the way to compute the product of the transposed factors; None: by its sizes.

    Long sums are divided into stretches, as those of the product are, so that their errors are no
    larger.
    """
    return "packed" if product.transpose_a and product.depth > MOST_STEPS else None


def _filled(number: int, lanes: int) -> int:
    """Return the elements of whole vectors."""
    return ceil_div(number, lanes) * lanes


def emit_turned(product: Matmul, cpu: CPU, tensors: tuple, emit: Callable) -> None:
    """Emit a product as that of the transposed factors.

    Parameters
    ----------
    product : Matmul
        The product, with static extents.
    cpu : CPU
        The target CPU.
    tensors : tuple
        A, B and C.
    emit : Callable
        ``emit(product, way, tensors)`` emits the product of the transposed factors.
    """
    a, bb, c = tensors
    rows, columns, vectors = product.rows, product.columns, Vectors(cpu.lanes)
    size = rows * columns
    turned = b.scratch(product.batch * size)
    emit(product.turned(), way_of_turned(product), (bb, a, turned))
    most = max(_VECTORS_OF_TASK, ceil_div(ceil_div(rows, cpu.lanes), cpu.cores)) * cpu.lanes
    tasks = ceil_div(rows, most)
    with (
        b.one_thread(product.batch * size <= _FEW_ELEMENTS),
        b.parallel(0, product.batch * tasks) as task,
    ):
        i = bind(task // tasks)
        row = bind((task - i * tasks) * most)
        number = bind(tirx.min(const(most), rows - row))
        for column in range(0, columns, cpu.lanes):
            left = min(cpu.lanes, columns - column)
            to = bind(i * size + row * columns + column)
            vectors.copy_transposed(
                (turned, bind(i * size + column * rows + row), rows),
                None if left == cpu.lanes else const(left),
                number,
                c,
                lambda k, to=to: to + k * columns,
                stored=None if left == cpu.lanes else const(left),
                repeats=True,
            )
