"""The tensor expression of dropout by the counter-based generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import te, tirx

from ..ir.compat import Analyzer
from ..ir.dtypes import accumulation_dtype


def rows_of(shape: Sequence, per_row: int) -> int | tirx.PrimExpr:
    """Return the number of rows of the generator, at least 1, that a tensor of a shape takes."""
    count = math.prod(int(n) if isinstance(n, tirx.IntImm) else n for n in shape)
    if isinstance(count, int):
        return max(1, -(-count // per_row))
    return Analyzer().simplify((count + (per_row - 1)) // per_row)


def dropped(data: te.Tensor, kept: te.Tensor, scale: float) -> te.Tensor:
    """Multiply the kept elements by a factor, and set the others to 0.

    Parameters
    ----------
    data : te.Tensor
        The data, in half precision multiplied in float32.
    kept : te.Tensor
        Whether each element is kept, in the order of :func:`relax_grad.topi.philox.philox`.
    scale : float
        The factor.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the data.
    """

    def is_kept(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        return kept(*_place(_index(index, data.shape), kept))

    return _dropped(data, is_kept, scale)


def first_rows(stream: te.Tensor, shape: Sequence, per_row: int) -> te.Tensor:
    """Return the first row of the generator that each element of the batch of a tensor takes, as a
    part of a tensor with more heads.

    Parameters
    ----------
    stream : te.Tensor
        The stream, the number of the first head, and the number of heads of an element of the
        batch.
    shape : Sequence
        The shape of the part, ``(batch, heads, queries, keys)``.
    per_row : int
        The count of numbers of a row.
    """
    return te.compute(
        [shape[0]],
        lambda batch: _start(stream, batch, shape) // per_row,
        name="first_rows",
    )


def rows_of_part(shape: Sequence, per_row: int) -> int | tirx.PrimExpr:
    """Return the number of rows of the generator that any element of the batch of a part takes."""
    return rows_of(shape[1:], per_row) + 1  # it may begin within a row


def dropped_part(data: te.Tensor, kept: te.Tensor, stream: te.Tensor, scale: float) -> te.Tensor:
    """Multiply the kept elements of a part by a factor, and set the others to 0.

    Parameters
    ----------
    data : te.Tensor
        The part, ``(batch, heads, queries, keys)``, in half precision multiplied in float32.
    kept : te.Tensor
        Whether each element of the rows of each element of the batch is kept, in the order of
        :func:`relax_grad.topi.philox.philox_of_parts`.
    stream : te.Tensor
        The stream, the number of the first head, and the number of heads of an element of the
        batch.
    scale : float
        The factor.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape and the dtype of the data.
    """
    words, lanes = map(int, kept.shape[2:])

    def is_kept(batch: tirx.PrimExpr, *index: tirx.PrimExpr) -> tirx.PrimExpr:
        begin = _start(stream, batch, data.shape) % (words * lanes)
        return kept(batch, *_place(begin + _index(index, data.shape[1:]), kept))

    return _dropped(data, is_kept, scale)


def _start(stream: te.Tensor, batch: tirx.PrimExpr, shape: Sequence) -> tirx.PrimExpr:
    """Return the number of the first element of an element of the batch, as a part of a tensor with
    more heads."""
    return (batch.astype("int64") * stream(2) + stream(1)) * (shape[2] * shape[3])


def _index(index: Sequence, shape: Sequence) -> tirx.PrimExpr:
    """Return the number of an element of a tensor."""
    at = tirx.const(0, "int64")
    for i, extent in zip(index, shape, strict=True):
        at = at * extent + i
    return at


def _place(at: tirx.PrimExpr, kept: te.Tensor) -> tuple:
    """Return the row, the word and the lane of the number of an element."""
    words, lanes = map(int, kept.shape[-2:])
    return at // (words * lanes), at // lanes % words, at % lanes


def _dropped(data: te.Tensor, is_kept: Callable, scale: float) -> te.Tensor:
    wide = accumulation_dtype(data.dtype)

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        value = data(*index).astype(wide) * tirx.const(scale, wide)
        chosen = tirx.Select(is_kept(*index), value, tirx.const(0, wide))
        return chosen.astype(data.dtype)

    return te.compute(data.shape, element, name="seeded_dropout")
