"""Matrix products of few columns, as the products of the transposed factors.

Few columns fill a part of the vectors of a tile, and a transposed first factor is copied for them
alone. The product of the second and the first factor, both transposed, has as many columns as the
first factor has rows, and reads it as vectors. Its result is transposed at the end.
"""

from __future__ import annotations

from tvm import tirx

from ..language import builder as b
from ..language.builder import Vectors, bind, const
from ..language.statements import Emit
from ._plans import MatmulPlan, TransposedPlan


def emit_turned(plan: MatmulPlan, own: TransposedPlan, tensors: tuple, emit: Emit) -> None:
    """Emit a product of the transposed factors.

    Parameters
    ----------
    plan : MatmulPlan
        The plan of the product, with static extents.
    own : TransposedPlan
        Its plan for the transposed factors.
    tensors : tuple
        A, B and C.
    emit : Callable
        ``emit(plan, tensors)`` emits the product of the transposed factors.
    """
    (a, bb, c), product, lanes = tensors, plan.product, plan.cpu.lanes
    rows, columns, vectors = product.rows, product.columns, Vectors(lanes)
    size = rows * columns
    turned = b.scratch(product.batch * size)
    emit(own.inner, (bb, a, turned))
    most, tasks = own.most, own.tasks
    with (
        b.one_thread(own.in_one_thread),
        b.parallel(0, product.batch * tasks) as task,
    ):
        i = bind(task // tasks)
        row = bind((task - i * tasks) * most)
        number = bind(tirx.min(const(most), rows - row))
        for column in range(0, columns, lanes):
            left = min(lanes, columns - column)
            to = bind(i * size + row * columns + column)
            vectors.copy_transposed(
                (turned, bind(i * size + column * rows + row), rows),
                None if left == lanes else const(left),
                number,
                c,
                lambda k, to=to: to + k * columns,
                stored=None if left == lanes else const(left),
                repeats=True,
                strides=(columns,),
            )
