"""The Relax operators of programs, between the calls of TIR functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tvm.relax import op

from .language import extent_at


class RelaxOperator(NamedTuple):
    """An operator.

    Attributes
    ----------
    apply : Callable
        Returns the call, given the shape of the result, the operands and the attributes.
    compute : Callable
        Returns the value by NumPy, given the symbolic extent, the operands and the attributes.
    """

    apply: Callable
    compute: Callable


def _plain(function: Callable) -> Callable:
    """Return ``function`` with an additional first parameter, the unused shape of the result."""
    return lambda shape, *args: function(*args)


#: The operators by their names in descriptions.
OPERATORS = {
    "add": RelaxOperator(_plain(op.add), lambda n, x, y: x + y),
    "subtract": RelaxOperator(_plain(op.subtract), lambda n, x, y: x - y),
    "multiply": RelaxOperator(_plain(op.multiply), lambda n, x, y: x * y),
    "maximum": RelaxOperator(_plain(op.maximum), lambda n, x, y: np.maximum(x, y)),
    "minimum": RelaxOperator(_plain(op.minimum), lambda n, x, y: np.minimum(x, y)),
    "relu": RelaxOperator(_plain(op.nn.relu), lambda n, x: np.maximum(x, 0)),
    "negative": RelaxOperator(_plain(op.negative), lambda n, x: -x),
    "tanh": RelaxOperator(_plain(op.tanh), lambda n, x: np.tanh(x)),
    "permute_dims": RelaxOperator(_plain(op.permute_dims), lambda n, x, axes: x.transpose(axes)),
    "reshape": RelaxOperator(
        lambda shape, x, _: op.reshape(x, shape),
        lambda n, x, shape: x.reshape([extent_at(size, n) for size in shape]),
    ),
    "matmul": RelaxOperator(_plain(op.matmul), lambda n, x, y: x @ y),
    "sum": RelaxOperator(_plain(op.sum), lambda n, x, axis: x.sum(axis, dtype=x.dtype)),
    "max": RelaxOperator(_plain(op.max), lambda n, x, axis: x.max(axis)),
    "concat": RelaxOperator(
        lambda shape, x, y, axis: op.concat([x, y], axis),
        lambda n, x, y, axis: np.concatenate([x, y], axis),
    ),
    "flip": RelaxOperator(_plain(op.flip), lambda n, x, axis: np.flip(x, axis)),
}
