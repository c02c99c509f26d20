"""Gradients of the activations at their special points."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax


def relu_gradient(x):
    param = relax.Var("x", relax.TensorType(x.shape, x.dtype.name))
    bb = relax.BlockBuilder()
    with bb.function("main", [param]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.nn.relu(param))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    return machine["main_adjoint"](tvm.runtime.tensor(x))[1][0].numpy()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_relu_at_its_special_points(dtype):
    x = np.array([-1, -0.0, 0.0, 1, -np.inf, np.inf, np.nan], dtype)
    found = relu_gradient(x)
    assert found.dtype == dtype
    assert found.tolist() == [0, 0, 0, 1, 0, 1, 1]


def test_relu_of_nan_is_that_of_torch(torch):
    x = np.array([0.0, np.nan, -1.0, 2.0])
    leaf = torch.tensor(x, requires_grad=True)
    torch.relu(leaf).sum().backward()
    assert relu_gradient(x).tolist() == leaf.grad.tolist()
