"""Which depthwise convolutions and gradients become kernels, and that the numbers do not change."""

from __future__ import annotations

import numpy as np
import pytest
from dispatched import check_dispatch, kernels_in
from programs import build, tensor
from tvm import tirx
from tvm.relax import op

import relax_grad

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def loss(conv, data, weight, **attrs):
    """Return the module of the sum of the squares of a convolution, and its gradients."""
    params = [tensor("data", data, "float32"), tensor("weight", weight, "float32")]

    def body(bb, x, w):
        y = bb.emit(conv(x, w, groups=weight[0], **attrs))
        return op.sum(bb.emit(op.multiply(y, y)))

    module = relax_grad.value_and_grad(build(params, body))
    del module["main"]
    return module


@pytest.mark.parametrize("batch", [2, N], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("name", "data", "weight", "attrs"),
    [
        ("conv2d", (5, 7, 7), (5, 1, 3, 3), {"padding": 1, "strides": 2}),
        ("conv1d", (5, 9), (5, 1, 4), {"padding": (0, 3), "dilation": 2}),
    ],
)
def test_gradients(name, data, weight, attrs, batch):
    module = loss(getattr(op.nn, name), (batch, *data), weight, **attrs)
    values = [RNG.normal(size=shape).astype("float32") for shape in ((2, *data), weight)]
    gradients = [f"grad_{name}_backward_{argument}_kernel" for argument in ("data", "weight")]
    check_dispatch(module, "main_adjoint", values, [f"nn_{name}_kernel", *gradients])


@pytest.mark.parametrize(
    ("weight", "attrs", "number"),
    [((5, 1, 12, 12), {}, 0), ((5, 1, 2, 2), {"strides": 5}, 2)],
    ids=["many taps", "data gradient of large strides"],
)
def test_large_windows_and_strides_have_no_kernel(weight, attrs, number):
    module = loss(op.nn.conv2d, (2, 5, 14, 14), weight, **attrs)
    assert len([name for name in kernels_in(module) if "conv" in name]) == number
