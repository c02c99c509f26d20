"""Which convolutions run as kernels, and that these give the numbers of what they take the place of."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relax_grad.transform.dispatch import DispatchKernels

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})
RNG = np.random.default_rng(0)


def module(shapes, build) -> tvm.IRModule:
    """A function of tensors of these shapes."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(build(*params))
        bb.emit_func_output(result)
    return bb.get()


def kernels_of(mod: tvm.IRModule) -> list[str]:
    return [variable.name_hint for variable in mod.get_global_vars() if "kernel" in str(variable)]


def run(mod, *arrays):
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def forward(data, weight, **attrs):
    return relax.op.nn.conv2d(data, weight, **attrs)


CASES = {
    "plain": ({"padding": 1}, (3, 8, 9, 9), (12, 8, 3, 3)),
    "strided": ({"strides": (2, 1), "padding": (0, 1, 2, 1)}, (3, 8, 9, 8), (12, 8, 2, 3)),
    "product": ({}, (3, 8, 23, 23), (12, 8, 1, 1)),
    "grouped": ({"groups": 2, "dilation": 2}, (3, 8, 9, 9), (12, 4, 3, 3)),
}


@pytest.mark.parametrize("batch", [3, "n"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_in_the_place_of_conv2d(case, batch):
    attrs, data, weight = CASES[case]
    symbolic = (tirx.Var(batch, "int64") if batch == "n" else batch, *data[1:])
    arrays = [RNG.normal(size=shape).astype("float32") for shape in (data, weight)]
    mod = module([symbolic, weight], lambda *args: forward(*args, **attrs))
    dispatched = DispatchKernels(TARGET)(mod)
    assert kernels_of(dispatched) == ["nn_conv2d_kernel"]
    wanted = run(mod, *arrays)
    np.testing.assert_allclose(run(dispatched, *arrays), wanted, rtol=1e-4, atol=1e-4)

    def gradient(output_grad, kernel):
        return relax.op.grad.conv2d_backward_data(output_grad, symbolic, kernel, **attrs)

    out = wanted.shape
    mod = module([(symbolic[0], *out[1:]), weight], gradient)
    arrays[0] = RNG.normal(size=out).astype("float32")
    dispatched = DispatchKernels(TARGET)(mod)
    assert kernels_of(dispatched) == ["grad_conv2d_backward_data_kernel"]
    np.testing.assert_allclose(run(dispatched, *arrays), run(mod, *arrays), rtol=1e-4, atol=1e-4)


def test_kernels_in_the_place_of_conv1d():
    data, weight = (2, 6, 20), (10, 6, 5)
    attrs = {"strides": 2, "padding": (1, 3)}
    arrays = [RNG.normal(size=shape).astype("float32") for shape in (data, weight)]
    mod = module([data, weight], lambda *args: relax.op.nn.conv1d(*args, **attrs))
    dispatched = DispatchKernels(TARGET)(mod)
    assert kernels_of(dispatched) == ["nn_conv1d_kernel"]
    wanted = run(mod, *arrays)
    np.testing.assert_allclose(run(dispatched, *arrays), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("data", "weight", "attrs"),
    [
        ((2, 9, 9, 8), (12, 8, 3, 3), {"data_layout": "NHWC", "out_layout": "NCHW"}),
        ((2, 8, tirx.Var("h", "int64"), 9), (12, 8, 3, 3), {}),
        ((2, 8, 2, 9), (12, 8, 3, 3), {}),
    ],
    ids=["layout", "symbolic height", "no window"],
)
def test_what_is_left(data, weight, attrs):
    mod = module([data, weight], lambda *args: forward(*args, **attrs))
    assert kernels_of(DispatchKernels(TARGET)(mod)) == []
