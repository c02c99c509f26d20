"""Softmax, its logarithm and its gradient become kernels along the last axis."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import check_dispatch, kernels_in
from tvm import relax, tirx

from relax_grad.op.activation import softmax_backward

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


@pytest.mark.parametrize("batch", [2, N])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_kernels(name, batch):
    x = tensor("x", (batch, 3, 21), "float32")
    values = [RNG.normal(size=(2, 3, 21)).astype("float32")]
    module = build([x], lambda x: getattr(relax.op.nn, name)(x, axis=2))
    check_dispatch(module, "main", values, [f"nn_{name}_kernel"])


def test_gradient():
    params = [tensor(name, (2, 3, 21), "float32") for name in ("dy", "y")]
    values = [RNG.normal(size=(2, 3, 21)).astype("float32") for _ in params]
    module = build(params, softmax_backward)
    check_dispatch(module, "main", values, ["grad_softmax_backward_kernel"])


def test_another_axis_is_left():
    x = tensor("x", (2, 3, 21), "float32")
    assert kernels_in(build([x], lambda x: relax.op.nn.softmax(x, axis=1))) == []
