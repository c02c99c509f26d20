"""Tensors of TVM as arrays with the same memory, and their reduction."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by it)
import numpy as np
import tvm

#: The dtypes that are reduced as others, which are exact enough.
REDUCED_IN = {"float16": "float32", "bfloat16": "float32", "bool": "uint8"}

#: The elements that are reduced at once, so that all of their arrays are in the cache.
_BLOCK = 2**15


def viewed(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """Return the elements of a tensor as an array with the same memory."""
    dtype: np.dtype = np.dtype(str(tensor.dtype))
    return at_address(tensor.data_ptr(), math.prod(map(int, tensor.shape)), dtype)


def at_address(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Return the elements at an address."""
    if not count:
        return np.empty(0, dtype)
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def reduce_to(result: np.ndarray, arrays: Sequence[np.ndarray], kind: str) -> None:
    """Write the reduction of arrays of one dtype to ``result``, in the order of the arrays."""
    dtype = REDUCED_IN.get(str(result.dtype))
    operation = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(kind, np.add)
    for begin in range(0, result.size, _BLOCK):
        out = result[begin : begin + _BLOCK]
        parts = [array[begin : begin + _BLOCK] for array in arrays]
        if dtype:
            parts = [part.astype(dtype) for part in parts]
        total = parts[0] if dtype else out
        if len(parts) == 1:
            total[...] = parts[0]
        for i in range(1, len(parts)):
            operation(parts[0] if i == 1 else total, parts[i], out=total)
        if kind == "avg":
            divide(total, len(parts))
        if dtype:
            out[...] = total.astype(out.dtype)


def divide(array: np.ndarray, count: int) -> None:
    """Divide an array by a number; integers are rounded towards 0."""
    if array.dtype.kind != "f":
        array[...] = (np.sign(array) * (np.abs(array) // count)).astype(array.dtype)
    elif count & (count - 1):
        np.divide(array, count, out=array)
    else:  # the reciprocal is exact
        np.multiply(array, array.dtype.type(1 / count), out=array)


__all__ = ["REDUCED_IN", "at_address", "divide", "reduce_to", "viewed"]
