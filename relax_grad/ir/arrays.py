"""Tensors of TVM and PyTorch as arrays of NumPy."""

from __future__ import annotations

import numpy as np
import tvm


def is_tensor(value: object) -> bool:
    """Tell whether a value is a tensor of TVM or PyTorch, or an array of NumPy."""
    return isinstance(value, (tvm.runtime.Tensor, np.ndarray)) or hasattr(value, "detach")


def as_array(value: object) -> np.ndarray:
    """Return a tensor or the like of an array as an array of NumPy, which may share its memory.

    Tensors of PyTorch may need a gradient, be strided, be on a device, and have the dtype bfloat16,
    which PyTorch cannot convert to NumPy.
    """
    if isinstance(value, tvm.runtime.Tensor):
        return value.numpy()
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy()
    # TVM refuses memory of others that is strided or not aligned.
    return tvm.runtime.from_dlpack(tensor.contiguous().clone()).numpy()
