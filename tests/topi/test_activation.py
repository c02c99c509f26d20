"""Tensor expressions of the activations, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import te, tirx

from relax_grad.topi import activation

#: The gradients of softmax and log_softmax in NumPy, given the output gradient, the result and the
#: axis.
BACKWARD = {
    activation.softmax_backward: lambda dy, y, axis: (dy - (dy * y).sum(axis, keepdims=True)) * y,
    activation.log_softmax_backward: lambda dy, y, axis: (
        dy - dy.sum(axis, keepdims=True) * np.exp(y)
    ),
}


@pytest.mark.parametrize(
    ("shape", "slopes", "axis"),
    [((2, 3), 3, 1), ((2, 3), 2, 0), ((2, 3), 3, -1), ((2, 3), 1, 1), ((4,), 4, 0), ((2, 1), 1, 1)],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_prelu(shape, slopes, axis, dtype):
    rng = np.random.default_rng(0)
    x, alpha = (rng.normal(size=size).astype(dtype) for size in (shape, (slopes,)))
    tensors = [
        te.placeholder([tirx.IntImm("int64", size) for size in value.shape], dtype)
        for value in (x, alpha)
    ]
    result = activation.prelu(*tensors, axis)
    function = tvm.compile(te.create_prim_func([*tensors, result]), target=TARGET)
    out = tvm.runtime.tensor(np.full(shape, np.nan, dtype))
    function(tvm.runtime.tensor(x), tvm.runtime.tensor(alpha), out)
    slope = alpha.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
    np.testing.assert_allclose(out.numpy(), np.where(x > 0, x, slope * x), rtol=1e-3)


@pytest.mark.parametrize(
    "dtypes", [("float64",) * 2, ("float16", "float16"), ("float16", "float32")]
)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("expression", BACKWARD)
def test_backward_of_softmax(expression, axis, dtypes):
    """A float16 accumulator is too narrow for a sum of 4096 elements."""
    shape = [2, 3, 2]
    shape[axis] = 4096
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(0, 1, shape).astype(dtype) for dtype in dtypes]
    tensors = [te.placeholder(shape, value.dtype.name, "x") for value in inputs]
    function = te.create_prim_func([*tensors, expression(*tensors, axis)])
    out = tvm.runtime.tensor(np.full(shape, np.nan, dtypes[0]))
    tvm.compile(function, target=TARGET)(*map(tvm.runtime.tensor, inputs), out)
    grad, output = (value.astype("float64") for value in inputs)
    expected = BACKWARD[expression](grad, output, axis)
    tolerance = 1e-12 if dtypes[0] == "float64" else 1e-3
    np.testing.assert_allclose(out.numpy(), expected, tolerance, tolerance)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 5)])
@pytest.mark.parametrize("expression", BACKWARD)
def test_backward_of_softmax_of_symbolic_extents_that_may_be_empty(expression, shape):
    n, m = (tirx.Var(name, "int64") for name in "nm")
    tensors = [te.placeholder((n, m), "float32", name) for name in ("dy", "y")]
    function = te.create_prim_func([*tensors, expression(*tensors, 1)])
    grad, output = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    out = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    tvm.compile(function, target=TARGET)(*map(tvm.runtime.tensor, (grad, output)), out)
    np.testing.assert_allclose(out.numpy(), BACKWARD[expression](grad, output, 1), 1e-5, 1e-5)
