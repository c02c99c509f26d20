"""Products with weights of 8 and 4 bits become kernels: the calls that do, and those that do
not."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from calls import build, tensor
from dispatched import check_dispatch, kernels_in
from quantized_weights import random_weight
from tvm import tirx
from tvm.relax.op import grad as backward

N = tirx.Var("n", "int64")
FORWARD, BACKWARD = (f"grad_quantized_matmul{name}_kernel" for name in ("", "_backward_data"))


def module(data, size, dtype="float32", weight="uint8", scale="float32", zeros=""):
    """Return the module of a product with a weight of 5 outputs and 40 inputs."""
    groups = -(-40 // size)
    width = size if weight == "int8" else size // 2
    params = [
        tensor("x", data, dtype),
        tensor("q", (5, groups, width), weight),
        tensor("s", (5, groups), scale),
    ]
    if zeros:
        params.append(tensor("z", (5, groups), zeros))
    return build(params, backward.quantized_matmul)


def test_symbolic_rows_of_stacks_and_zero_points():
    rng = np.random.default_rng(0)
    data = rng.normal(size=(2, 3, 40)).astype("float32")
    for bits, zeros in ((4, "uint8"), (8, "float32")):
        operands, _ = random_weight(rng, 5, 40, 16, bits, zeros)
        dtype = str(operands[0].dtype)
        mod = module((N, 3, 40), 16, weight=dtype, zeros=zeros)
        check_dispatch(mod, "main", [data, *operands], [FORWARD])


def test_gradient_of_symbolic_rows():
    rng = np.random.default_rng(1)
    operands, _ = random_weight(rng, 5, 40, 32, 4)
    grad = tensor("g", (N, 5), "float32")
    params = [grad, tensor("q", (5, 2, 16), "uint8"), tensor("s", (5, 2), "float32")]
    mod = build(params, lambda g, q, s: backward.quantized_matmul_backward_data(g, (N, 40), q, s))
    values = rng.normal(size=(3, 5)).astype("float32")
    check_dispatch(mod, "main", [values, *operands], [BACKWARD])


@pytest.mark.parametrize(
    "program",
    [
        module((3, 40), 32, "bfloat16"),
        module((3, 40), 32, "float16", scale="float16"),
        module((40,), 32, scale="float64"),
        module((3, 40), 16, scale="bfloat16", zeros="bfloat16"),
    ],
)
def test_other_floating_point_numbers_take_the_kernel_of_float32(program):
    assert kernels_in(program) == [FORWARD]


@pytest.mark.parametrize(
    "program",
    [module((3, 40), 32, "float64"), module((3, 40), 24), module((0, 40), 32)],
    ids=["float64", "groups of no whole vectors", "no rows"],
)
def test_calls_without_a_kernel(program):
    target = {"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2}
    assert FORWARD not in kernels_in(program, tvm.target.Target(target))
