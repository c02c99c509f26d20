"""The tensor expressions of scans against loops over elements, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import te, tirx

from relax_grad.topi import scan as topi_scan


def run(build, arrays, symbolic):
    """Run ``build(*placeholders)`` for arrays of one shape, with int64 extents."""
    shape = [
        tirx.Var(f"n{i}", "int64") if symbolic else tirx.IntImm("int64", extent)
        for i, extent in enumerate(arrays[0].shape)
    ]
    tensors = [te.placeholder(shape, array.dtype.name, f"x{i}") for i, array in enumerate(arrays)]
    function = te.create_prim_func([*tensors, build(*tensors)])
    out = tvm.runtime.tensor(np.full(arrays[0].shape, np.nan, arrays[0].dtype))
    tvm.compile(function, target=TARGET)(*(tvm.runtime.tensor(a) for a in arrays), out)
    return out.numpy()


def by_elements(multiplier, increment, axis, reverse):
    arrays = [np.moveaxis(multiplier, axis, 0)]
    arrays += [] if increment is None else [np.moveaxis(increment, axis, 0)]
    if reverse:
        arrays = [array[::-1] for array in arrays]
    out = np.empty_like(arrays[0])
    state = np.full(out.shape[1:], 1.0 if increment is None else 0.0)
    for i in range(len(out)):
        out[i] = state
        state = arrays[0][i] * state + (0 if increment is None else arrays[1][i])
    return np.moveaxis(out[::-1] if reverse else out, 0, axis)


#: Some axes are longer than the piece of a task, some have extent 1, and some are empty.
SHAPES = [(7,), (5, 130), (2, 5, 3, 70), (3, 1, 4), (0, 3), (3, 0), (2, 0, 3)]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_scan(shape, symbolic):
    rng = np.random.default_rng(0)
    a, b = rng.uniform(-1, 1, shape), rng.normal(size=shape)
    for axis in range(len(shape)):
        for reverse in (False, True):
            result = run(
                lambda a, b, axis=axis, reverse=reverse: topi_scan.linear_scan(a, b, axis, reverse),
                [a, b],
                symbolic,
            )
            np.testing.assert_allclose(result, by_elements(a, b, axis, reverse), atol=1e-12)
        result = run(
            lambda a, axis=axis: topi_scan.linear_scan(a, None, axis - len(shape), True),
            [a],
            symbolic,
        )
        np.testing.assert_allclose(result, by_elements(a, None, axis, True), atol=1e-12)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cumsum_backward_data(shape, exclusive):
    x = np.random.default_rng(0).normal(size=shape)
    for axis in range(len(shape)):
        result = run(
            lambda x, axis=axis: topi_scan.cumsum_backward_data(x, x.shape, axis, exclusive),
            [x],
            symbolic=True,
        )
        expected = np.flip(np.cumsum(np.flip(x, axis), axis), axis) - (x if exclusive else 0)
        np.testing.assert_allclose(result, expected, atol=1e-12)


def test_half_precision_is_accumulated_in_float32():
    multiplier, increment = np.ones((2, 4097), "float16")
    result = run(lambda a, b: topi_scan.linear_scan(a, b, 0, False), [multiplier, increment], False)
    np.testing.assert_array_equal(result, np.arange(4097).astype("float16"))
