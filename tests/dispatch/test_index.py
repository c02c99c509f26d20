"""The gradient of taking rows becomes a kernel."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import check_dispatch, kernels_in
from tvm import tirx

from relax_grad.op.index import take_backward

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def module(shape, indices, axis, dtype, mode="fast"):
    result = (*shape[:axis], *indices, *shape[axis + 1 :])
    params = [
        tensor("dy", result, "float32"),
        tensor("x", shape, "float32"),
        tensor("indices", indices, dtype),
    ]
    return build(params, lambda dy, x, i: take_backward(dy, x, i, axis=axis, mode=mode))


@pytest.mark.parametrize("mode", ["fast", "clip", "wrap", "nan"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "int8"])
def test_embedding(dtype, mode):
    values = [
        RNG.normal(size=(4, 5, 24)).astype("float32"),
        RNG.normal(size=(7, 24)).astype("float32"),
        RNG.integers(-9, 9, (4, 5)).astype(dtype),
    ]
    mod = module((7, 24), (N, 5), 0, dtype, mode)
    check_dispatch(mod, "main", values, ["grad_take_backward_kernel"])


def test_an_inner_axis():
    values = [
        RNG.normal(size=(2, 5, 6)).astype("float32"),
        RNG.normal(size=(2, 3, 6)).astype("float32"),
        RNG.integers(-4, 4, 5),
    ]
    mod = module((2, 3, 6), (5,), 1, "int64")
    check_dispatch(mod, "main", values, ["grad_take_backward_kernel"])


def test_what_is_left():
    assert kernels_in(module((4, 2), (5,), 0, "int64")) == []
    assert kernels_in(module((4, 24), (5,), 0, "uint8")) == []
