"""Kernels in half precision against the same kernels in float32.

A kernel that computes in float32 and rounds each result once returns the rounded results of the
float32 kernel.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence

import kernel_cases
import ml_dtypes
import numpy as np
import pytest
import tvm
from kernel_cases.case import KernelCall, KernelCase, kernel_of
from machines import TARGETS, WIDEST, compile_kernels, runs_here
from sweep import share

from relax_grad.ir.dtypes import HALVES

CASES = {
    dtype: [
        case for case in kernel_cases.cases() if case.takes(dtype) and not case.differs_in_halves
    ]
    for dtype in HALVES
}

#: The step between the cases that the default suite runs.
SOME = 12

_DTYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def differences(cases: Sequence[KernelCase], dtype: str, name: str) -> Iterator[str]:
    """Yield the cases whose results in a dtype are not those of the float32 kernel, rounded."""
    target, batches = tvm.target.Target(TARGETS[name]), (3, None)
    pairs = [
        tuple(kernel_of(case, target, batch, element) for element in (dtype, "float32"))
        for case in cases
        for batch in batches
    ]
    functions = {
        f"{kind}{i}": call.function
        for i, pair in enumerate(pairs)
        for kind, call in zip(("narrow", "wide"), pair, strict=True)
    }
    library = compile_kernels(functions, target)
    for i, (narrow, wide) in enumerate(pairs):
        arrays = _inputs(narrow, _DTYPES[dtype])
        floats = [x.astype("float32") if x.dtype == _DTYPES[dtype] else x for x in arrays]
        results = _run(library[f"narrow{i}"], narrow, arrays)
        wanted = _run(library[f"wide{i}"], wide, floats)
        for own, other in zip(results, wanted, strict=True):
            if own.tobytes() != other.astype(own.dtype).tobytes():
                error = np.abs(own.astype("float64") - other.astype("float64")).max()
                yield f"{narrow.case.name}: {error} of {np.abs(other).max()}"


def _inputs(call: KernelCall, half: np.dtype) -> list[np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(call.case.name.encode()))
    return [
        rng.integers(-5, 5, shape).astype(dtype)
        if dtype.startswith("int")
        else rng.normal(size=shape).astype(half if dtype in HALVES else dtype)
        for shape, dtype in call.at(3)[0]
    ]


def _run(function, call: KernelCall, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the results of a kernel; elements that it does not write are NaN."""
    inputs = [_tensor(array) for array in arrays]
    results = [
        _tensor(
            np.frombuffer(b"\xff" * (math.prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(
                shape
            )
        )
        for shape, dtype in call.at(3)[1]
    ]
    function(*inputs, *results)
    for array, tensor in zip(arrays, inputs, strict=True):
        assert array.tobytes() == tensor.numpy().tobytes(), "a kernel has written to its input"
    return [result.numpy() for result in results]


def _tensor(array: np.ndarray):
    return tvm.runtime.empty(array.shape, array.dtype.name).copyfrom(array)


@pytest.mark.parametrize("dtype", HALVES)
def test_some_kernels(dtype):
    assert list(differences(CASES[dtype][HALVES.index(dtype) :: SOME], dtype, WIDEST)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("target", TARGETS)
def test_all_kernels(target, dtype):
    if not runs_here(target):
        pytest.skip(f"this machine has no {target}")
    assert list(differences(share(CASES[dtype]), dtype, target)) == []
