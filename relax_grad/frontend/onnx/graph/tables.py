"""Constants of an ONNX graph that their values show to be tables of the program."""

from __future__ import annotations

import math
import re

import numpy as np
import onnx

from ..read.load import Arrays, value_of

#: The most rows and columns of a table that are examined, and the fewest rows of sinusoids.
_MOST_ROWS, _MOST_COLUMNS, _FEWEST_ROWS = 64, 16, 6

#: Larger banks of filters are not examined.
_MOST_FILTERS = 1 << 20

#: The largest error of sinusoids, relative to the largest element: float16 rounds tables.
_TOLERANCE = 2e-3


def stands_for_none(tensor: onnx.TensorProto, name: str, arrays: Arrays) -> bool:
    """Tell whether a scale or a bias of a normalisation belongs to a layer without one, as
    exporters write it."""
    if not re.search(r"(?i)(^|[/_.])const(ant|[_:\d]|$)", name):
        return False
    value = value_of(tensor, arrays)
    return bool((value == 0).all() or (value == 1).all())


def table_reason(tensor: onnx.TensorProto, arrays: Arrays) -> str | None:
    """Return the reason for which a constant is a table of the program by its values, or None."""
    if len(tensor.dims) < 2 or math.prod(tensor.dims) < _FEWEST_ROWS * 2:
        return None
    value = value_of(tensor, arrays)
    value = (
        value.reshape(value.shape[0], -1)
        if value.shape[0] > 1
        else value.reshape(-1, value.shape[-1])
    )
    for matrix in (value, value.T):
        half = len(matrix) // 2
        for parts in ([matrix], [matrix[:half], matrix[half:]], [matrix[::2], matrix[1::2]]):
            if all(map(_is_sinusoidal, parts)):
                return (
                    "it holds sines and cosines, as the basis of a Fourier transform and a "
                    "table of positions do"
                )
        if _is_filter_bank(matrix):
            return "it holds overlapping band filters"
    return None


def _is_sinusoidal(matrix: np.ndarray) -> bool:
    """Tell whether each column is a sinusoid: ``x[k + 1] + x[k - 1] = 2 cos(w) x[k]``."""
    if len(matrix) < _FEWEST_ROWS or matrix.shape[1] < 2:
        return False
    step = max(1, matrix.shape[1] // _MOST_COLUMNS)
    part = np.asarray(matrix[:_MOST_ROWS, ::step], np.float64)
    if not np.isfinite(part).all():
        return False
    inner, sides = part[1:-1], part[2:] + part[:-2]
    squares = (inner**2).sum(0)
    factor = (inner * sides).sum(0) / np.where(squares > 0, squares, 1)
    bound = _TOLERANCE * np.abs(part).max()
    oscillates = (np.abs(factor) < 1.99) & (squares > 0)
    return bool(oscillates.sum() >= 2 and (np.abs(sides - factor * inner) <= bound).all())


def _is_filter_bank(matrix: np.ndarray) -> bool:
    """Tell whether the columns are ordered bands that rise and then fall, such as the mel filters
    of a spectrum."""
    rows, columns = matrix.shape
    if rows < 16 or columns < 4 or rows < columns or matrix.size > _MOST_FILTERS:
        return False
    if (matrix < 0).any() or 10 * np.count_nonzero(matrix) > 4 * matrix.size:
        return False
    ends, wide = [], 0
    for column in matrix.T:
        (places,) = np.nonzero(column)
        if not len(places):
            continue
        band = column[places[0] : places[-1] + 1]
        top = int(band.argmax())
        if (
            len(places) < len(band)
            or (np.diff(band[: top + 1]) < 0).any()
            or (np.diff(band[top:]) > 0).any()
        ):
            return False
        ends.append((places[0], places[-1]))
        wide += len(places) > 1
    return (
        wide >= 3
        and ends == sorted(ends)
        and [end for _, end in ends] == sorted(end for _, end in ends)
    )
