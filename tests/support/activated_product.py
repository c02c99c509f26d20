"""A sum of an activated matrix product, as the tests of compiled functions have it."""

from __future__ import annotations

import numpy as np
import tvm
from programs import build, tensor
from tvm.relax import op

_RNG = np.random.default_rng(0)

#: The factors.
ARRAYS = [_RNG.normal(size=shape).astype("float32") for shape in ((6, 32), (32, 48))]


def factors() -> list:
    """Return the parameters ``x`` and ``w`` of the types of the factors."""
    return [tensor(name, array.shape, "float32") for name, array in zip("xw", ARRAYS, strict=True)]


def module(activation=op.nn.gelu) -> tvm.IRModule:
    """Return a module whose ``main`` takes the factors."""

    def body(bb, x, w):
        return op.sum(bb.emit(activation(bb.emit(op.matmul(x, w)))))

    return build(factors(), body)
