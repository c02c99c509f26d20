"""Sums of materialized tensors become kernels."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import check_dispatch, kernels_in
from tvm import relax, tirx

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")
SHAPE = (N, 6, 5, 7)
SUMS = {
    "channels": lambda x: relax.op.sum(x, [0, 2, 3]),
    "rows": lambda x: relax.op.mean(x, [3, -2], keepdims=True),
    "columns": lambda x: relax.op.mean(x, [0]),
    "inner columns": lambda x: relax.op.sum(x, [1, 2], keepdims=True),
}


@pytest.mark.parametrize("case", SUMS)
def test_sums(case):
    module = build([tensor("x", SHAPE, "float32")], SUMS[case])
    name = "mean" if case in ("rows", "columns") else "sum"
    values = [RNG.normal(size=(3, *SHAPE[1:])).astype("float32")]
    check_dispatch(module, "main", values, [f"{name}_kernel"])


@pytest.mark.parametrize("shape", [(7,), (5, 7), (6, 1, 1), (3, 6, 1, 7)])
def test_collapse_sum(shape):
    x = tensor("x", (3, 6, 5, 7), "float32")
    values = [RNG.normal(size=(3, 6, 5, 7)).astype("float32")]
    module = build([x], lambda x: relax.op.collapse_sum_to(x, relax.ShapeExpr(shape)))
    check_dispatch(module, "main", values, ["collapse_sum_to_kernel"])


@pytest.mark.parametrize(
    "body",
    [
        lambda x: relax.op.sum(x),
        lambda x: relax.op.sum(x, [1, 3]),
        lambda x: relax.op.sum(relax.op.multiply(x, x), [0]),
    ],
)
def test_unsupported_sums_have_no_kernel(body):
    assert kernels_in(build([tensor("x", SHAPE, "float32")], body)) == []
