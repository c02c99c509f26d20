"""Tests of the extents of tensors of known shape."""

from __future__ import annotations

import pytest
from tvm import relax, tirx

from relax_grad.ir.shapes import known_extents, static_extents

_BATCH = tirx.Var("batch", "int64")


@pytest.mark.parametrize(
    ("kind", "known", "static"),
    [
        (relax.TensorType((2, 3), "float32"), [2, 3], [2, 3]),
        (relax.TensorType((), "float32"), [], []),
        (relax.TensorType((_BATCH, 3), "float32"), [_BATCH, 3], None),
        (relax.TensorType(ndim=2, dtype="float32"), None, None),
        (relax.TensorType(relax.Var("shape", relax.ShapeType([2])), "float32"), None, None),
        (relax.ShapeType([2, 3]), None, None),
        (relax.TupleType([relax.TensorType((2,), "float32")]), None, None),
    ],
)
def test_extents(kind, known, static):
    assert known_extents(kind) == known
    assert static_extents(kind) == static
