"""Tensor expressions for the normalisations."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from relax_grad.topi.norm import divide_by_count


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_count_is_not_rounded_to_the_dtype(dtype):
    """70000 is infinite in float16."""
    n = tirx.Var("n", "int64")
    like = te.placeholder((n, 7), "int8", "like")
    data = te.placeholder((2,), dtype, "data")
    function = tvm.compile(
        te.create_prim_func([data, like, divide_by_count(data, like.shape, [0, 1])]), target="llvm"
    )
    values = np.array([6e4, -1.0], dtype)
    out = tvm.runtime.tensor(np.zeros(2, dtype))
    function(tvm.runtime.tensor(values), tvm.runtime.tensor(np.zeros((10000, 7), "int8")), out)
    wide = "float64" if dtype == "float64" else "float32"
    expected = (values.astype(wide) / np.dtype(wide).type(70000)).astype(dtype)
    np.testing.assert_array_equal(out.numpy(), expected)
