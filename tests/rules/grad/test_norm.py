"""The gradients of the backward operators of the normalisations."""

from __future__ import annotations

import numpy as np
import pytest

from relax_grad.testing import check_gradients

#: For each operator, the number of its arguments, and attributes for data of two axes.
KINDS = {
    "layer_norm": (3, {"axes": [1], "epsilon": 0.5}),
    "rms_norm": (2, {"axes": [1], "epsilon": 0.5}),
    "instance_norm": (3, {"channel_axis": 1, "axes": [0], "epsilon": 0.5}),
    "group_norm": (3, {"num_groups": 1, "channel_axis": 1, "axes": [], "epsilon": 0.5}),
}


@pytest.mark.parametrize("name", KINDS)
def test_constant_data_to_second_order(name):
    """Where z is 0, or 1 for rms_norm, all results are finite and correct."""
    count, attrs = KINDS[name]
    rng = np.random.default_rng(0)
    inputs = [np.full((2, 3), 2.0), *rng.normal(size=(2, 3))][:count]
    check_gradients(f"relax.nn.{name}", inputs, order=2, **attrs)


def backward_call(name, dtypes):
    """Return small arguments of a backward operator, the data in one dtype and the statistics in
    another."""
    rng = np.random.default_rng(0)
    shapes = {
        "batch_norm_backward_data": [(2, 3)] * 2 + [(3,)] * 5,
        "batch_norm_backward_gamma": [(2, 3)] * 2 + [(3,)] * 2,
        "layer_norm_backward_data": [(2, 3)] * 2 + [(3,)] + [(2, 1)] * 2,
        "rms_norm_backward_weight": [(2, 3)] * 2 + [(2, 1)],
    }[name]
    narrow, wide = dtypes
    return [
        rng.uniform(0.5, 1.5, shape).astype(narrow if i < 2 else wide)
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    "name",
    [
        "batch_norm_backward_data",
        "batch_norm_backward_gamma",
        "layer_norm_backward_data",
        "rms_norm_backward_weight",
    ],
)
def test_partial_has_the_dtype_of_its_argument(name):
    """Data in half precision and statistics in float32, as the rules give them."""
    inputs = backward_call(name, ("float16", "float32"))
    attrs = {"axis": 1} if name.startswith("batch") else {"axes": [1]}
    check_gradients(f"relax.grad.{name}", inputs, order=1, rtol=2e-2, **attrs)
