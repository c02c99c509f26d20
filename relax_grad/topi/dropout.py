"""The tensor expression of dropout by the counter-based generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    wide = accumulation_dtype(data.dtype)
    words, lanes = map(int, kept.shape[1:])

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        at = tirx.const(0, "int64")
        for i, extent in zip(index, data.shape, strict=True):
            at = at * extent + i
        row, word, lane = at // (words * lanes), at // lanes % words, at % lanes
        value = data(*index).astype(wide) * tirx.const(scale, wide)
        chosen = tirx.Select(kept(row, word, lane), value, tirx.const(0, wide))
        return chosen.astype(data.dtype)

    return te.compute(data.shape, element, name="seeded_dropout")
