"""Tensor expressions of the activations, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from relax_grad.topi import activation


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
    function = tvm.compile(te.create_prim_func([*tensors, result]), target="llvm")
    out = tvm.runtime.tensor(np.full(shape, np.nan, dtype))
    function(tvm.runtime.tensor(x), tvm.runtime.tensor(alpha), out)
    slope = alpha.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
    np.testing.assert_allclose(out.numpy(), np.where(x > 0, x, slope * x), rtol=1e-3)
