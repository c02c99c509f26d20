"""The legalization of batch_norm where TVM's is wrong: half precision and negative axes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

SHAPE = (5, 4, 3)


def run(dtype, axis, training):
    """Return the three results of batch_norm of random data, and the arguments."""
    rng = np.random.default_rng(0)
    channels = SHAPE[axis]
    values = [rng.normal(3.0, 2.0, SHAPE), *rng.uniform(0.5, 1.5, (4, channels))]
    values = [value.astype(dtype) for value in values]
    params = [
        relax.Var(name, relax.TensorType(value.shape, dtype))
        for name, value in zip("xgbmv", values, strict=True)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(
                relax.op.nn.batch_norm(*params, axis=axis, training=training, momentum=0.25)
            )
        bb.emit_func_output(result)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), "llvm"), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(value) for value in values))
    return [item.numpy() for item in results], values


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_batch_norm(dtype, axis, training):
    results, values = run(dtype, axis, training)
    x, gamma, beta, mean, var = (value.astype("float64") for value in values)
    others = tuple(i for i in range(3) if i != axis % 3)
    shape = [1, 1, 1]
    shape[axis] = -1
    new_mean, new_var = mean, var
    if training:
        batch_mean, batch_var = x.mean(others), x.var(others)
        new_mean = 0.75 * mean + 0.25 * batch_mean
        new_var = 0.75 * var + 0.25 * batch_var
        mean, var = batch_mean, batch_var
    y = (x - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + 1e-5)
    expected = [y * gamma.reshape(shape) + beta.reshape(shape), new_mean, new_var]
    tolerance = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12}[dtype]
    for found, wanted in zip(results, expected, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
