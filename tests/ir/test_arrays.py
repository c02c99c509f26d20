"""Tensors of TVM and PyTorch as arrays of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_grad.ir.arrays import as_array, is_tensor


@pytest.mark.parametrize("value", [[[1.0, 2.0]], np.array([[1.0, 2.0]]), (np.float64(1.0),), 3.0])
def test_the_like_of_an_array(value):
    np.testing.assert_array_equal(as_array(value), np.array(value))


def test_a_tensor_of_tvm():
    array = np.arange(6, dtype="int32").reshape(2, 3)
    np.testing.assert_array_equal(as_array(tvm.runtime.tensor(array)), array)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64", "bool"])
def test_a_tensor_of_pytorch(dtype):
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    numbers = torch.arange(12).reshape(3, 4)
    tensor = numbers.to(getattr(torch, dtype))
    if tensor.is_floating_point():
        tensor.requires_grad_()
    for view in (tensor, tensor.T, tensor[1:, 1:], tensor.reshape(-1)[1:]):
        array = as_array(view)
        assert str(array.dtype) == dtype
        np.testing.assert_array_equal(array.astype("float64"), view.detach().double().numpy())


def test_tensors_are_told_from_other_values():
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    assert all(map(is_tensor, (np.ones(2), torch.ones(2), tvm.runtime.tensor(np.ones(2)))))
    assert not any(map(is_tensor, ([1.0], 1.0, "a", None)))
