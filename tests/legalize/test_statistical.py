"""Reductions over axes that may be empty, and medians over several axes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax, tirx

from relax_grad.testing._program import numpy_dtype


def run(op, x, symbolic=False, **attrs):
    shape = [tirx.Var(f"n{i}", "int64") for i in range(x.ndim)] if symbolic else x.shape
    param = relax.Var("x", relax.TensorType(shape, x.dtype.name))
    bb = relax.BlockBuilder()
    with bb.function("main", [param]):
        with bb.dataflow():
            result = bb.emit_output(getattr(relax.op, op)(param, **attrs))
        bb.emit_func_output(result)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), target=TARGET), tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(x))
    return result.numpy() if hasattr(result, "numpy") else tuple(part.numpy() for part in result)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", 0), ("prod", 1), ("mean", math.nan), ("variance", math.nan), ("std", math.nan)],
)
def test_reduction_over_an_empty_axis(op, expected, symbolic):
    result = run(op, np.zeros((3, 0), "float32"), symbolic, axis=[1], keepdims=True)
    np.testing.assert_array_equal(result, np.full((3, 1), expected, "float32"))
    for keepdims in (False, True):
        x = np.random.default_rng(0).normal(size=(3, 2))
        numpy_op = getattr(np, {"variance": "var"}.get(op, op))
        result = run(op, x, symbolic, axis=[-2], keepdims=keepdims)
        np.testing.assert_allclose(result, numpy_op(x, axis=0, keepdims=keepdims), rtol=1e-12)


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_reduction_of_integers_over_an_empty_axis(op):
    result = run(op, np.zeros((2, 0), "int32"), symbolic=True, axis=[1])
    assert result.dtype == "int32"
    assert result.tolist() == [op == "prod"] * 2


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [[2, 0], [-1, 1], None])
def test_median_over_several_axes(axis, keepdims, symbolic):
    x = np.random.default_rng(0).normal(size=(2, 3, 2)).astype("float32")
    axes = (0, 1, 2) if axis is None else tuple(axis)
    expected = np.quantile(x, 0.5, axes, method="lower", keepdims=keepdims)
    result = run("median", x, symbolic, axis=axis, keepdims=keepdims)
    assert result.shape == expected.shape
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_median_along_an_axis(dtype):
    x = np.array([[3, 1, 2, 1], [0, 5, 4, 5]]).astype(numpy_dtype(dtype))
    for symbolic in (False, True):
        value, index = run("median", x, symbolic, axis=[1])
        assert value.dtype == x.dtype
        assert value.tolist() == [1, 4]
        assert index.tolist() == [3, 2]
    assert run("median", x) == 2


def test_median_over_no_axes_is_the_tensor():
    x = np.arange(4.0).reshape(2, 2)
    value, index = run("median", x, axis=[])
    np.testing.assert_array_equal(value, x)
    np.testing.assert_array_equal(index, np.zeros((2, 2), "int64"))


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_median_over_an_empty_axis(symbolic):
    value, index = run("median", np.zeros((2, 0)), symbolic, axis=[1])
    np.testing.assert_array_equal(value, [math.nan] * 2)
    np.testing.assert_array_equal(index, [0, 0])
