"""Softmax, its logarithm and their gradients, along rows.

A row is read three times, for its maximum, for the sum of the exponentials and for the result, while it is
in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ..target import CPU
from . import _builder as b
from . import _math as math
from ._builder import Extent, Sums, Vectors, bind

_LOWEST = float("-inf")


def softmax(rows: Extent, columns: Extent, shape: Sequence[Extent], cpu: CPU) -> tirx.PrimFunc:
    """Return softmax along the rows of ``[rows, columns]``.

    Parameters
    ----------
    rows, columns : int or tirx.PrimExpr
        The extents.
    shape : Sequence
        The shape of x and of the result.
    cpu : CPU
        What the function is for.

    Returns
    -------
    function : tirx.PrimFunc
        Takes x and y.
    """
    vectors = Vectors(cpu.lanes)

    def row(base, x, y) -> None:
        largest = _largest(vectors, x, base, columns)

        def exponential(o, number):
            value = math.exp(bind(vectors.load(x, base + o, number) - largest))
            vectors.store(y, base + o, value, number)
            return [vectors.only(value, number)]

        sums = Sums(vectors)
        sums.add_row(columns, exponential)
        factor = bind(vectors.splat(tirx.const(1.0, "float32") / sums.totals()[0]))

        def scale(o, number) -> None:
            vectors.store(y, base + o, vectors.load(y, base + o, number) * factor, number)

        vectors.each(columns, scale)

    return _of_rows("softmax", ("x", "y"), rows, columns, shape, row)


def log_softmax(rows: Extent, columns: Extent, shape: Sequence[Extent], cpu: CPU) -> tirx.PrimFunc:
    """Return the logarithm of softmax along the rows of ``[rows, columns]``, as for :func:`softmax`."""
    vectors = Vectors(cpu.lanes)

    def row(base, x, y) -> None:
        largest = _largest(vectors, x, base, columns)

        def exponential(o, number):
            value = math.exp(bind(vectors.load(x, base + o, number) - largest))
            return [vectors.only(value, number)]

        sums = Sums(vectors)
        sums.add_row(columns, exponential)
        shift = bind(vectors.splat(tirx.log(sums.totals()[0])))

        def scale(o, number) -> None:
            value = vectors.load(x, base + o, number) - largest - shift
            vectors.store(y, base + o, value, number)

        vectors.each(columns, scale)

    return _of_rows("log_softmax", ("x", "y"), rows, columns, shape, row)


def softmax_backward(
    rows: Extent, columns: Extent, shape: Sequence[Extent], cpu: CPU
) -> tirx.PrimFunc:
    """Return the gradient of softmax along the rows of ``[rows, columns]``.

    Parameters
    ----------
    rows, columns, shape, cpu
        As for :func:`softmax`.

    Returns
    -------
    function : tirx.PrimFunc
        Takes dy, y, and dx, which it sets to ``(dy - sum(dy * y)) * y``.
    """
    vectors = Vectors(cpu.lanes)

    def row(base, dy, y, dx) -> None:
        def product(o, number):
            return [vectors.load(dy, base + o, number) * vectors.load(y, base + o, number)]

        sums = Sums(vectors)
        sums.add_row(columns, product)
        total = bind(vectors.splat(sums.totals()[0]))

        def element(o, number) -> None:
            grad = vectors.load(dy, base + o, number) - total
            vectors.store(dx, base + o, grad * vectors.load(y, base + o, number), number)

        vectors.each(columns, element)

    return _of_rows("softmax_backward", ("dy", "y", "dx"), rows, columns, shape, row)


def _largest(vectors: Vectors, x: tirx.Buffer, base, columns: Extent):
    """Return a vector of the largest element of a row."""
    largest = Sums(vectors, start=_LOWEST, combine=tirx.max)
    largest.add_row(
        columns,
        lambda o, number: [vectors.only(vectors.load(x, base + o, number), number, _LOWEST)],
    )
    return bind(vectors.splat(largest.totals()[0]))


def _of_rows(
    name: str,
    names: Sequence[str],
    rows: Extent,
    columns: Extent,
    shape: Sequence[Extent],
    row: Callable,
) -> tirx.PrimFunc:
    """Return the function of tensors of one shape that does something for each row."""

    def body(*buffers) -> None:
        with b.parallel(0, rows) as i:
            row(bind(i * columns), *buffers)

    return b.prim_func(name, [(each, shape, "float32") for each in names], body)
