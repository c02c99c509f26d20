"""Scatter-adds: the gradients of taking rows (as in an embedding) and of gathering elements; also,
taking columns.

Each task owns a range of columns or rows of the result, and processes the indices in their order.
So no two tasks add to the same element, and the order of additions does not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tvm import tirx

from ....topi.position import position
from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, Vectors, as_expr, bind, ceil_div, const
from ..language.halves import Tensor
from ._plans import ScatterPlan, scatter_plan

#: Rows with fewer elements are added element by element.
_SHORTEST = 4

Shapes = Sequence[Sequence[Extent]]


def take_backward(
    outer: Extent,
    extent: Extent,
    columns: int,
    shapes: Shapes,
    index_dtype: str,
    mode: str,
    cpu: CPU,
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of the data of take.

    Parameters
    ----------
    outer, extent, columns : int or tirx.PrimExpr
        The data is ``[outer, extent, columns]``, and its rows were taken by index; ``columns`` is
        not symbolic.
    shapes : Sequence
        The shapes of dy, of the indices, and of dx.
    index_dtype : str
        The dtype of the indices.
    mode : str
        The meaning of an index, as for ``relax.op.take``; indices that refer to no row contribute
        nothing.
    cpu : CPU
        The target CPU.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, the indices, and dx.
    """

    def body(dy: Tensor, indices: tirx.Buffer, dx: Tensor) -> None:
        _add_rows(
            scatter_plan(outer, extent, columns, cpu),
            prod(shapes[1]),
            lambda i: position(indices[i], extent, mode),
            dy=dy,
            dx=dx,
        )

    dtypes = ("float32", index_dtype, "float32")
    params = list(zip(("dy", "indices", "dx"), shapes, dtypes, strict=True))
    return b.prim_func("take_backward", params, body)


def points_backward(
    extents: Sequence[Extent],
    columns: int,
    number: Extent,
    shapes: Shapes,
    index_dtypes: Sequence[str],
    cpu: CPU,
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of the data of gather_nd or index_tensor.

    Parameters
    ----------
    extents : Sequence
        The extents of the indexed axes, which are the first axes.
    columns : int
        The number of elements along all later axes.
    number : int or tirx.PrimExpr
        The number of points.
    shapes : Sequence
        The shapes of dy, of the tensors of indices, and of dx. A single tensor of indices holds all
        indices of a point side by side; several tensors hold one index of a point each.
    index_dtypes : Sequence[str]
        The dtypes of the tensors of indices.
    cpu : CPU
        The target CPU.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, the tensors of indices, and dx. Negative indices count from the end; out-of-bounds
        indices contribute nothing.
    """
    together = len(index_dtypes) == 1

    def body(dy: Tensor, *rest: tirx.Buffer) -> None:
        *indices, dx = rest

        def locate(i: tirx.PrimExpr) -> tuple:
            row, inside = tirx.const(0, "int64"), []
            for axis, extent in enumerate(extents):
                index = indices[0][i * len(extents) + axis] if together else indices[axis][i]
                where, exists = position(bind(index), extent, "fast")
                row = row * tirx.Cast("int64", as_expr(extent)) + where
                inside.append(exists)
            return row, tirx.all(*inside)

        plan = scatter_plan(1, prod(extents), columns, cpu)
        _add_rows(plan, number, locate, dy=dy, dx=dx)

    names = [f"indices{i}" for i in range(len(index_dtypes))]
    dtypes = ("float32", *index_dtypes, "float32")
    params = list(zip(("dy", *names, "dx"), shapes, dtypes, strict=True))
    return b.prim_func("points_backward", params, body)


def gather_elements_backward(
    rows: Extent,
    extents: tuple[Extent, Extent],
    shapes: Shapes,
    index_dtype: str,
    cpu: CPU,
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of the data of gather_elements along the last axis.

    Parameters
    ----------
    rows : int or tirx.PrimExpr
        The number of rows of the data and of the indices.
    extents : tuple
        The length of a row of the data, and of the indices.
    shapes : Sequence
        The shapes of dy, of the indices, and of dx.
    index_dtype : str
        The dtype of the indices.
    cpu : CPU
        The target CPU.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, the indices, and dx. Negative indices count from the end; out-of-bounds indices
        contribute nothing.
    """
    extent, number = extents
    # Each element of the data is a row.
    plan = scatter_plan(rows, extent, 1, cpu)

    def body(dy: Tensor, indices: tirx.Buffer, dx: Tensor) -> None:
        _clear(plan, dx)
        with b.parallel(0, rows * plan.shares) as task:
            row, share = bind(task // plan.shares), bind(task % plan.shares)
            with b.serial(0, number) as i:
                source = bind(row * number + i)
                where, inside = position(bind(indices[source]), extent, "fast")
                with b.when(_owned(plan, where, inside, share)):
                    target = bind(row * extent + tirx.Cast("int32", where))
                    b.store(dx, target, dx[target] + dy[source])

    dtypes = ("float32", index_dtype, "float32")
    params = list(zip(("dy", "indices", "dx"), shapes, dtypes, strict=True))
    return b.prim_func("gather_elements_backward", params, body)


def take_columns(
    rows: Extent, extent: Extent, shapes: Shapes, index_dtype: str, mode: str
) -> tirx.PrimFunc:
    """Return the kernel of take along the last axis.

    Parameters
    ----------
    rows, extent : int or tirx.PrimExpr
        The data is ``[rows, extent]``.
    shapes : Sequence
        The shapes of x, of the indices, and of the result.
    index_dtype, mode
        As for :func:`take_backward`; the result is NaN for indices that refer to no element.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x, the indices, and the result.
    """
    number = prod(shapes[1])

    def body(x: Tensor, indices: tirx.Buffer, y: Tensor) -> None:
        # Indices are resolved once for all rows.
        places = b.scratch(number, "int32")
        with b.parallel(0, number) as i:
            where, inside = position(bind(indices[i]), extent, mode)
            where = tirx.Select(inside, where, tirx.const(-1, "int64"))
            b.store(places, i, tirx.Cast("int32", where))
        with b.parallel(0, rows) as row, b.serial(0, number) as i:
            place = bind(places[i])
            value = x[row * extent + tirx.max(place, const(0))]
            nan = tirx.const(float("nan"), "float32")
            # The read is in bounds in both cases, except if x is empty.
            b.store(y, row * number + i, tirx.Select(place >= 0, value, nan))

    dtypes = ("float32", index_dtype, "float32")
    params = list(zip(("x", "indices", "y"), shapes, dtypes, strict=True))
    return b.prim_func("take", params, body)


def _add_rows(
    plan: ScatterPlan,
    number: Extent,
    locate: Callable,
    dy: tirx.Buffer,
    dx: tirx.Buffer,
) -> None:
    """Emit the additions of the rows of ``dy``, ``[outer, number, columns]``, to rows of ``dx``.

    ``locate(i)`` returns the row of ``dx`` that the i-th row is added to, and whether it exists.
    """
    rows, columns, width, vectors = plan.rows, plan.columns, plan.width, Vectors(plan.lanes)
    parts, shares = plan.parts, plan.shares

    def add(source: tirx.PrimExpr, target: tirx.PrimExpr, size: int) -> None:
        if columns < _SHORTEST:
            for o in range(columns):
                b.store(dx, target + o, dx[target + o] + dy[source + o])
            return

        def some(o: tirx.PrimExpr, n: Extent | None) -> None:
            total = vectors.load(dx, target + o, n) + vectors.load(dy, source + o, n)
            vectors.store(dx, target + o, total, n)

        vectors.each(size, some)

    _clear(plan, dx)
    with b.parallel(0, plan.outer * (parts * shares)) as task:
        n, share = bind(task // (parts * shares)), bind(task % shares)
        part = bind(task // shares % parts)
        with b.serial(0, number) as i:
            where, inside = locate(i)
            where = bind(where)
            with b.when(_owned(plan, where, inside, share)):
                row = bind(tirx.Cast("int32", where))
                source = bind((n * number + i) * columns + part * width)
                target = bind((n * rows + row) * columns + part * width)
                if plan.last == width:
                    add(source, target, width)
                else:
                    b.either(
                        part < parts - 1,
                        lambda: add(source, target, width),
                        lambda: add(source, target, plan.last),
                    )


def _clear(plan: ScatterPlan, dx: tirx.Buffer) -> None:
    """Set dx to 0, in parallel."""
    size, vectors = plan.outer * plan.rows * plan.columns, Vectors(plan.lanes)
    piece = ceil_div(size, plan.clears)
    with b.parallel(0, plan.clears) as i:
        start = bind(i * piece)
        left = bind(tirx.max(const(0), tirx.min(as_expr(piece), size - start)))
        vectors.each(left, lambda o, n: vectors.store(dx, start + o, vectors.splat(0), n))


def _owned(
    plan: ScatterPlan, where: tirx.PrimExpr, inside: tirx.PrimExpr, share: tirx.PrimExpr
) -> tirx.PrimExpr:
    """Return the condition that a row exists and lies in a share."""
    if plan.shares == 1:
        return inside
    first = tirx.Cast("int64", share * plan.share)
    end = first + tirx.Cast("int64", as_expr(plan.share))
    return tirx.all(inside, where >= first, where < end)
