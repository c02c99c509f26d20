"""The operators of Relax that programs have between the calls of TIR functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .language import extent_at


class RelaxOperator(NamedTuple):
    """An operator.

    Attributes
    ----------
    text : str
        Its TVMScript, of the operands and then the attributes.
    compute : Callable
        Its value by NumPy, of the symbolic extent, the operands and the attributes.
    """

    text: str
    compute: Callable


def _reshape(n: int, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return x.reshape([extent_at(size, n) for size in shape])


#: By the names that descriptions have for them.
OPERATORS = {
    "add": RelaxOperator("R.add({0}, {1})", lambda n, x, y: x + y),
    "subtract": RelaxOperator("R.subtract({0}, {1})", lambda n, x, y: x - y),
    "multiply": RelaxOperator("R.multiply({0}, {1})", lambda n, x, y: x * y),
    "maximum": RelaxOperator("R.maximum({0}, {1})", lambda n, x, y: np.maximum(x, y)),
    "minimum": RelaxOperator("R.minimum({0}, {1})", lambda n, x, y: np.minimum(x, y)),
    "relu": RelaxOperator("R.nn.relu({0})", lambda n, x: np.maximum(x, 0)),
    "negative": RelaxOperator("R.negative({0})", lambda n, x: -x),
    "tanh": RelaxOperator("R.tanh({0})", lambda n, x: np.tanh(x)),
    "permute_dims": RelaxOperator(
        "R.permute_dims({0}, axes={1})", lambda n, x, axes: x.transpose(axes)
    ),
    "reshape": RelaxOperator("R.reshape({0}, R.shape({1}))", _reshape),
    "matmul": RelaxOperator("R.matmul({0}, {1})", lambda n, x, y: x @ y),
    "sum": RelaxOperator(
        "R.sum({0}, axis={1})", lambda n, x, axis: x.sum(tuple(axis), dtype=x.dtype)
    ),
    "max": RelaxOperator("R.max({0}, axis={1})", lambda n, x, axis: x.max(tuple(axis))),
    "concat": RelaxOperator(
        "R.concat(({0}, {1}), axis={2})", lambda n, x, y, axis: np.concatenate([x, y], axis)
    ),
    "flip": RelaxOperator("R.flip({0}, axis={1})", lambda n, x, axis: np.flip(x, axis)),
}
