"""Recurrent layers become kernels: the calls that do, and those that do not."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import HOST, check_dispatch, kernels_in
from tvm import tirx
from tvm.relax.op import grad as backward

from relax_grad.transform import DispatchKernels

T, B, H = (tirx.Var(name, "int64") for name in "tbh")


def lstm(steps, batch, size, dtype="float32"):
    shapes = [(steps, batch, 4 * size), (batch, size), (batch, size), (4 * size, size)]
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    return build(params, backward.lstm)


def test_symbolic_steps_and_batch():
    rng = np.random.default_rng(0)
    shapes = [(4, 3, 20), (3, 5), (3, 5), (20, 5)]
    values = [rng.normal(size=shape).astype("float32") for shape in shapes]
    check_dispatch(lstm(T, B, 5), "main", values, ["grad_lstm_kernel"])


def test_half_precision_takes_the_kernel_of_float32():
    assert kernels_in(DispatchKernels(HOST)(lstm(3, 2, 5, "bfloat16"))) == ["grad_lstm_kernel"]


@pytest.mark.parametrize(
    "module",
    [
        lstm(3, 2, 5, "float64"),
        lstm(3, 2, H),
        lstm(0, 2, 5),
        lstm(3, 2, 9000),
        lstm(2**13, 2**8, 2**8 - 20),
    ],
    ids=["float64", "a symbolic size", "no steps", "a large weight", "slopes beyond int32"],
)
def test_calls_without_a_kernel(module):
    assert "grad_lstm_kernel" not in kernels_in(DispatchKernels(HOST)(module))
