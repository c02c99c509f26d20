"""Attention becomes kernels: the calls that do, and those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from calls import build, tensor
from dispatched import HOST, check_dispatch, kernels_in
from tvm import relax, tirx

import relax_grad
from relax_grad.transform import DispatchKernels

RNG = np.random.default_rng(0)
N, S, T = (tirx.Var(name, "int64") for name in "nst")
nn = relax.op.nn

#: The shapes of queries, keys and values.
SHAPES = [(2, 9, 4, 6), (2, 21, 2, 6), (2, 21, 2, 5)]


def module_of(shapes, dtype="float32", **attrs):
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    make = nn.attention if len(shapes) == 3 else nn.attention_bias
    return build(params, lambda *tensors: make(*tensors, **attrs))


def values_of(shapes):
    return [RNG.normal(size=shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"causal_mask": "TopLeft", "scale": 0.3},
        {"causal_mask": "BottomRight"},
        {"causal_mask": "TopLeft", "window_size": 4},
        {"causal_mask": "TopLeft", "window_size": 0},
        {"causal_mask": "TopLeft", "window_size": 2**31 - 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_kernels(attrs, symbolic):
    shapes = [(N, S, 4, 6), (N, T, 2, 6), (N, T, 2, 5)] if symbolic else SHAPES
    module = module_of(shapes, **attrs)
    check_dispatch(module, "main", values_of(SHAPES), ["nn_attention_kernel"])


@pytest.mark.parametrize("bias", [(2, 4, 9, 21), (1, 1, 9, 21), (2, 1, 1, 21)], ids=str)
def test_kernels_with_a_bias(bias):
    shapes = [*SHAPES, bias]
    check_dispatch(module_of(shapes), "main", values_of(shapes), ["nn_attention_bias_kernel"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_in_half_precision_are_as_near_as_their_roundings(dtype):
    shapes = [(2, 9, 4, 6), (2, 40, 4, 6), (2, 40, 4, 5)]
    unit = 2**-8 if dtype == "bfloat16" else 2**-11
    operands = [value.astype(dtype) for value in values_of(shapes)]
    query, key, value = (operand.astype("float64") for operand in operands)
    scores = np.einsum("bqhf,bkhf->bhqk", query, key) / np.sqrt(6)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    shares = weights / weights.sum(-1, keepdims=True)
    expected = np.einsum("bhqk,bkhf->bqhf", shares, value)
    # Exponentials may be rounded to bfloat16. The largest one, 1, is exact.
    rounded = np.where((weights == 1) | (dtype == "float16"), 0, shares)
    bound = unit * (np.einsum("bhqk,bkhf->bqhf", rounded, np.abs(value)) + np.abs(expected))
    module = tvm.compile(module_of(shapes, dtype), HOST, relax_pipeline="relax_grad")
    result = relax.VirtualMachine(module, tvm.cpu())["main"](*map(tvm.runtime.tensor, operands))
    assert (np.abs(result.numpy().astype("float64") - expected) <= bound + unit**2).all()


def gradient(shapes, wrt=(0, 1, 2), **attrs):
    """Return the module of an attention with its gradients."""
    module = relax_grad.vjp(module_of(shapes, **attrs), "main", list(wrt))
    module = relax.transform.DeadCodeElimination(["main_vjp"])(module)
    del module["main"]
    return module


def numbers_of_arguments(module):
    """Return the number of arguments of each kernel that replaces a call of an operator."""
    dispatched = DispatchKernels(HOST)(module)
    return [
        len(binding.value.args[1].fields)
        for block in dispatched["main_vjp"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and len(binding.value.args) > 1
    ]


@pytest.mark.parametrize("symbolic", [False, True])
def test_the_gradient_takes_the_sums_of_the_forward_kernel(symbolic):
    shapes = [(N, S, 4, 6), (N, T, 2, 6), (N, T, 2, 5)] if symbolic else SHAPES
    module = gradient(shapes, causal_mask="TopLeft")
    values = values_of([*SHAPES, (2, 9, 4, 5)])
    kernels = ["nn_attention_kernel", "grad_attention_backward_kernel"]
    check_dispatch(module, "main_vjp", values, kernels)
    assert numbers_of_arguments(module) == [3, 6]


def test_the_gradient_of_a_bias_is_a_composition_beside_the_kernel():
    shapes = [*SHAPES, (1, 4, 9, 21)]
    kernels = kernels_in(gradient(shapes, (0, 1, 2, 3)))
    assert kernels[:2] == ["nn_attention_bias_kernel", "grad_attention_backward_kernel"]
    assert kernels_in(gradient(shapes)) == kernels[:2]


def test_a_gradient_without_a_kernel_consists_of_products():
    module = gradient([(2, 9, 4, 6), (2, 21, 2, 6), (2, 21, 4, 5)])
    kernels = kernels_in(module)
    assert kernels
    assert all("matmul" in name for name in kernels)


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (SHAPES, "float64"),
        ([(2, 9, 4, S), (2, 9, 4, S), (2, 9, 4, S)], "float32"),
        ([(2, 9, 4, 6), (2, 21, 2, 6), (2, 21, 4, 5)], "float32"),
    ],
    ids=["float64", "a symbolic number of features", "other heads of values"],
)
def test_no_kernel(shapes, dtype):
    assert "nn_attention_kernel" not in kernels_in(module_of(shapes, dtype))


@pytest.mark.parametrize(
    ("attrs", "match"),
    [
        ({"window_size": 2}, "a causal mask only"),
        ({"causal_mask": "Left"}, "must be 'TopLeft' or 'BottomRight'"),
    ],
)
def test_ambiguous_masks_are_refused(attrs, match):
    with pytest.raises(Exception, match=match):
        kernels_in(module_of(SHAPES, **attrs))
