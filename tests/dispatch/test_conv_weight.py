"""Weight gradients of convolutions become kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import relax_grad
from relax_grad.op.conv import conv1d_backward_weight, conv2d_backward_weight
from relax_grad.transform.dispatch import DispatchKernels

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})


def gradient(backward, output_grad, data, weight, **attrs):
    """Return a module whose main function is the gradient of a convolution of these shapes."""
    inputs = [
        relax.Var(name, relax.TensorType(shape, attrs.get("dtype", "float32")))
        for name, shape in (("output_grad", output_grad), ("data", data))
    ]
    attrs.pop("dtype", None)
    bb = relax.BlockBuilder()
    with bb.function("main", inputs):
        with bb.dataflow():
            result = bb.emit_output(backward(*inputs, weight, **attrs))
        bb.emit_func_output(result)
    return bb.get()


def kernels(mod):
    """Return the names of the kernels of a module."""
    mod = DispatchKernels(TARGET)(mod)
    return [
        variable.name_hint for variable in mod.get_global_vars() if variable.name_hint != "main"
    ]


CASES = {
    "3x3": (conv2d_backward_weight, (4, 5, 5), (3, 5, 5), (4, 3, 3, 3), {"padding": 1}),
    "stem": (conv2d_backward_weight, (12, 5, 5), (1, 5, 5), (12, 1, 3, 3), {"padding": 1}),
    "strided": (conv2d_backward_weight, (4, 3, 5), (3, 5, 5), (4, 3, 1, 1), {"strides": (2, 1)}),
    "grouped": (conv2d_backward_weight, (6, 4, 4), (4, 5, 5), (6, 2, 2, 2), {"groups": 2}),
    "1d": (conv1d_backward_weight, (4, 6), (3, 5), (4, 3, 2), {"padding": (0, 2)}),
}


@pytest.mark.parametrize("batch", [2, "n"])
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_as_without_kernels(name, batch):
    backward, out, images, weight, attrs = CASES[name]
    extent = tirx.Var("n", "int64") if batch == "n" else batch
    mod = gradient(backward, (extent, *out), (extent, *images), weight, **attrs)
    assert kernels(mod) == [f"grad_{backward.__name__}_kernel"]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, *shape)).astype("float32") for shape in (out, images)]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    found, wanted = (
        relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline), tvm.cpu())["main"](
            *tensors
        ).numpy()
        for pipeline in (relax_grad._pipeline.pipeline(), "default")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("out", "images", "weight", "attrs"),
    [
        ((2, 4, 5, 5), (2, 3, 5, 5), (4, 3, 1, 1), {"dtype": "float16"}),
        ((2, 5, 5, 4), (2, 5, 5, 3), (4, 3, 1, 1), {"data_layout": "NHWC"}),
        ((2, 4, tirx.Var("h", "int64"), 5), None, (4, 3, 1, 1), {}),
        ((2, 4, 0, 5), (2, 3, 0, 5), (4, 3, 1, 1), {}),
    ],
    ids=["half", "channels last", "symbolic height", "empty"],
)
def test_left_to_legalization(out, images, weight, attrs):
    images = images or (out[0], weight[1], *out[2:])
    assert kernels(gradient(conv2d_backward_weight, out, images, weight, **attrs)) == []
