"""Gradients of the operators that create tensors: dtypes that differ, and large sums."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax


def gradient(function, value):
    """Run the gradient of the sum, in float32, of a function of one tensor."""
    x = relax.Var("x", relax.TensorType(value.shape, value.dtype.name))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            wide = bb.emit(relax.op.astype(bb.emit(function(x)), "float32"))
            out = bb.emit_output(relax.op.sum(wide))
        bb.emit_func_output(out)
    module = relax.transform.Gradient("main", [x])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    return machine["main_adjoint"](tvm.runtime.tensor(value))[1][0].numpy()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: relax.op.full((2, 3), x), 6),
        (lambda x: relax.op.full((2, 3), x, "float16"), 6),
        (lambda x: relax.op.full((2, 3), x, "int32"), 0),
        (lambda x: relax.op.full_like(relax.const(np.ones((2, 2), "int32")), x, "float64"), 4),
        (lambda x: relax.op.full_like(relax.const(np.ones((2, 2), "int32")), x), 0),
        (lambda x: relax.op.zeros_like(x), 0),
        (lambda x: relax.op.ones_like(x), 0),
        (lambda x: relax.op.multiply(relax.op.zeros((2,), "float32"), x), 0),
        (lambda x: relax.op.multiply(relax.op.ones((2,), "float32"), x), 2),
    ],
)
def test_fill_value(function, expected):
    grad = gradient(function, np.array(0.5, "float32"))
    assert grad.dtype == "float32"
    np.testing.assert_array_equal(grad, expected)


def test_half_precision_sums_in_float32():
    grad = gradient(lambda x: relax.op.full((4100,), x), np.array(0.5, "float16"))
    assert grad.dtype == "float16"
    np.testing.assert_array_equal(grad, 4100)
