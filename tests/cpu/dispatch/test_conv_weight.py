"""Which weight gradients of convolutions become kernels, and that the numbers do not change."""

from __future__ import annotations

import numpy as np
import pytest
from dispatched import check_dispatch, kernels_in
from programs import build, tensor
from tvm import tirx

from relax_grad.op.conv import (
    conv1d_backward_weight,
    conv2d_backward_weight,
    conv3d_backward_weight,
)

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def gradient(backward, out, data, weight, dtype="float32", **attrs):
    """Return the module of the weight gradient of a convolution of two parameters."""
    params = [tensor("output_grad", out, dtype), tensor("data", data, dtype)]
    return build(params, lambda _, dy, x: backward(dy, x, weight, **attrs))


CASES = {
    "3x3": (conv2d_backward_weight, (4, 5, 5), (12, 5, 5), (4, 12, 3, 3), {"padding": 1}),
    "few channels": (conv2d_backward_weight, (40, 5, 5), (1, 5, 5), (40, 1, 3, 3), {"padding": 1}),
    "strided": (conv2d_backward_weight, (4, 3, 5), (3, 5, 5), (4, 3, 1, 1), {"strides": (2, 1)}),
    "grouped": (conv2d_backward_weight, (6, 4, 4), (4, 5, 5), (6, 2, 2, 2), {"groups": 2}),
    "volumes": (
        conv3d_backward_weight,
        (6, 3, 4, 5),
        (4, 3, 5, 5),
        (6, 4, 3, 2, 3),
        {"padding": (1, 0, 1)},
    ),
    "rows of volumes": (
        conv3d_backward_weight,
        (6, 3, 4, 5),
        (4, 5, 4, 5),
        (6, 4, 3, 1, 1),
        {},
    ),
    "one axis": (conv1d_backward_weight, (4, 6), (3, 5), (4, 3, 2), {"padding": (0, 2)}),
}


@pytest.mark.parametrize("batch", [2, N], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_weight_gradients(name, batch):
    backward, out, data, weight, attrs = CASES[name]
    module = gradient(backward, (batch, *out), (batch, *data), weight, **attrs)
    values = [RNG.normal(size=(2, *shape)).astype("float32") for shape in (out, data)]
    check_dispatch(module, "main", values, [f"grad_{backward.__name__}_kernel"])


@pytest.mark.parametrize(
    ("out", "data", "attrs"),
    [
        ((2, 4, 5, 5), (2, 3, 5, 5), {"dtype": "float64"}),
        ((2, 5, 5, 4), (2, 5, 5, 3), {"data_layout": "NHWC"}),
        ((2, 4, N, 5), (2, 3, N, 5), {}),
        ((2, 4, 0, 5), (2, 3, 0, 5), {}),
    ],
    ids=["float64", "channels last", "symbolic height", "empty"],
)
def test_unsupported_weight_gradients_have_no_kernel(out, data, attrs):
    module = gradient(conv2d_backward_weight, out, data, (4, 3, 1, 1), **attrs)
    assert kernels_in(module) == []
