"""Elementwise functions call no library, and fuse with their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from calls import build, tensor
from dispatched import HOST, kernels_in, run_both
from tvm import relax, tirx

FUNCTIONS = {
    "exp": relax.op.exp,
    "erf": relax.op.erf,
    "tanh": relax.op.tanh,
    "sigmoid": relax.op.sigmoid,
    "gelu": relax.op.nn.gelu,
    "gelu_tanh": relax.op.nn.gelu_tanh,
    "silu": relax.op.nn.silu,
}
EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-40, 88.6, -87.5, 1e-20, -1e-20]


def module(name):
    x = tensor("x", (tirx.Var("n", "int64"), 4), "float32")
    return build([x], FUNCTIONS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers(name):
    (kernel,) = kernels_in(module(name))
    assert kernel.endswith(f"{name}_kernel")
    values = np.concatenate([np.linspace(-100, 88, 4000), np.linspace(-8, 8, 4000), EDGES])
    values = values.astype("float32").reshape(-1, 4)
    ours, stock = run_both(module(name), "main", [values])
    np.testing.assert_allclose(ours, stock, rtol=4e-7, atol=6e-7)
    assert np.array_equal(np.isnan(ours), np.isnan(stock))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_call_of_a_library(name):
    executable = tvm.compile(module(name), HOST, relax_pipeline="relax_grad")
    assembly = "".join(each.inspect_source("asm") for each in executable.mod.imports)
    assert not any(f"{call}@" in assembly for call in ("expf", "erff", "tanhf"))


def test_fuses():
    x = tensor("x", (3, 4), "float32")
    mod = build([x], lambda x: relax.op.exp(relax.op.negative(relax.op.tanh(x))))
    executable = tvm.compile(mod, HOST, relax_pipeline="relax_grad")
    assert "fused" in executable.as_text()
    assert executable.as_text().count("fused") == 2  # once named, once called
