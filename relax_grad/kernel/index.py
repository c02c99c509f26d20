"""Sums of rows by index: the gradient of taking rows, as of an embedding.

Each task has a range of columns of all rows, and goes through the indices in their order. So no two tasks add to
the same element, and the order of additions does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import tirx

from ..target import CPU
from ..topi._position import position
from . import _builder as b
from ._builder import Extent, Vectors, bind, ceil_div

#: Vectors that a task has of a row, at least.
_NARROWEST = 4


def take_backward(
    outer: Extent,
    extent: Extent,
    columns: int,
    shapes: Sequence[Sequence[Extent]],
    index_dtype: str,
    mode: str,
    cpu: CPU,
) -> tirx.PrimFunc:
    """Return the gradient of the data of take.

    Parameters
    ----------
    outer, extent, columns : int or tirx.PrimExpr
        The data is ``[outer, extent, columns]``, of which rows were taken by index; ``columns`` is not symbolic.
    shapes : Sequence
        The shapes of dy, of the indices, and of dx.
    index_dtype : str
        The dtype of the indices.
    mode : str
        What an index means, as for ``relax.op.take``; what means no row contributes nothing.
    cpu : CPU
        What the function is for.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, the indices, and dx.
    """
    vectors = Vectors(cpu.lanes)
    number = prod(shapes[1])
    parts = max(1, min(cpu.cores, columns // (_NARROWEST * cpu.lanes)))
    width = ceil_div(ceil_div(columns, parts), cpu.lanes) * cpu.lanes
    parts = ceil_div(columns, width)

    def body(dy, indices, dx) -> None:
        with b.parallel(0, outer * extent) as row:
            base = bind(row * columns)
            vectors.each(columns, lambda o, n: vectors.store(dx, base + o, vectors.splat(0), n))

        def add(source, target, size: int) -> None:
            def some(o, n) -> None:
                total = vectors.load(dx, target + o, n) + vectors.load(dy, source + o, n)
                vectors.store(dx, target + o, total, n)

            vectors.each(size, some)

        with b.parallel(0, outer * parts) as task, b.serial(0, number) as i:
            n, part = bind(task // parts), bind(task % parts)
            where, inside = position(indices[i], extent, mode)
            with b.when(inside):
                row = bind(tirx.Cast("int32", where))
                source = bind((n * number + i) * columns + part * width)
                target = bind((n * extent + row) * columns + part * width)
                rest = columns - (parts - 1) * width
                if rest == width:
                    add(source, target, width)
                else:
                    b.either(
                        part < parts - 1,
                        lambda: add(source, target, width),
                        lambda: add(source, target, rest),
                    )

    dtypes = ("float32", index_dtype, "float32")
    params = list(zip(("dy", "indices", "dx"), shapes, dtypes, strict=True))
    return b.prim_func("take_backward", params, body)
