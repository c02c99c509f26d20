"""Tensor expressions of data movement, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import te, tirx

from relax_grad.topi import activation, index, manipulate
from relax_grad.topi._scatter import broadcast_shape


def run(build, *values, out_shape):
    """Compile ``build(*placeholders)`` and run it."""
    shapes = [[tirx.IntImm("int64", size) for size in value.shape] for value in values]
    tensors = [
        te.placeholder(shape, value.dtype.name) for shape, value in zip(shapes, values, strict=True)
    ]
    result = build(*tensors)
    function = tvm.compile(te.create_prim_func([*tensors, result]), target=TARGET)
    out = tvm.runtime.tensor(np.full(out_shape, np.nan, values[0].dtype))
    function(*(tvm.runtime.tensor(value) for value in values), out)
    return out.numpy()


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((2, 3, 4), (1, 4)),
        ((2, 3, 4), (2, 3, 4)),
        ((2, 3, 4), ()),
        ((1, 3), (1, 3)),
        ((0, 3), (1, 3)),
        ((2, 0), ()),
        ((0, 3), (0, 1)),
        ((), ()),
    ],
)
def test_collapse_sum(shape, target):
    data = np.random.default_rng(0).normal(size=shape).astype("float32")
    result = run(lambda x: manipulate.collapse_sum(x, target), data, out_shape=target)
    added = len(shape) - len(target)
    axes = tuple(i + added for i, n in enumerate(target) if n != shape[i + added])
    expected = data.sum(axis=axes, keepdims=True).sum(axis=tuple(range(added)))
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_sums_in_half_precision_are_accumulated_in_float32():
    ones = np.ones((4096, 2), "float16")
    result = run(lambda x: manipulate.collapse_sum(x, (2,)), ones, out_shape=(2,))
    assert result.tolist() == [4096, 4096]
    result = run(lambda x: manipulate.tile_backward_data(x, (2,), [4096, 1]), ones, out_shape=(2,))
    assert result.tolist() == [4096, 4096]
    result = run(
        lambda x: manipulate.repeat_backward_data(x, (1, 2), 4096, 0), ones, out_shape=(1, 2)
    )
    assert result.tolist() == [[4096, 4096]]


@pytest.mark.parametrize("extent", [0, 3])
def test_collapse_sum_over_a_symbolic_axis_that_may_be_empty(extent):
    n = tirx.Var("n", "int64")
    data = te.placeholder((n, 2), "float32")
    result = manipulate.collapse_sum(data, (2,))
    function = tvm.compile(te.create_prim_func([data, result]), target=TARGET)
    out = tvm.runtime.tensor(np.full(2, np.nan, "float32"))
    function(tvm.runtime.tensor(np.ones((extent, 2), "float32")), out)
    assert out.numpy().tolist() == [extent, extent]


def _length(n):
    """Return the length of ``x[:]`` and of ``x[-n:]`` for n rows, as it is inferred."""
    zero, one = tirx.const(0, "int64"), tirx.const(1, "int64")
    end = tirx.min(tirx.max(tirx.if_then_else(n < zero, n * 2 + one, n), zero), n + one)
    return tirx.max(n, end) - tirx.min(zero, n + one)


def test_extents_are_known_not_to_be_negative():
    n = tirx.Var("n", "int64")
    length = _length(n)
    assert len(broadcast_shape([(length, 4), (n, 1)])) == 2
    data = te.placeholder((2, length), "float32")
    assert activation.prelu(data, te.placeholder((n,), "float32"), 1).shape[1].same_as(length)
    indices = te.placeholder((length, 4), "int64")
    gathered = index.gather_elements(te.placeholder((n, 4), "float32"), indices, 1, "nan")
    assert "< n" not in str(gathered.op.body[0])


def test_collapse_sum_knows_that_extents_are_not_negative():
    n = tirx.Var("n", "int64")
    length = _length(n)
    result = manipulate.collapse_sum(te.placeholder((length, 4), "float32"), (n, 1))
    assert result.shape[0].same_as(n)


def test_collapse_sum_refuses_shapes_that_do_not_broadcast():
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    for source, target in (((2, 3), (2,)), ((3,), (1, 3)), ((n,), (m,))):
        with pytest.raises(ValueError, match="broadcastable"):
            manipulate.collapse_sum(te.placeholder(source, "float32"), target)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("repeats", [0, 1, 3])
def test_repeat(repeats, axis):
    data = np.arange(6, dtype="float32").reshape(2, 3)
    expected = np.repeat(data, repeats, axis)
    result = run(
        lambda x: manipulate.repeat(x, expected.shape, repeats, axis),
        data,
        out_shape=expected.shape,
    )
    np.testing.assert_array_equal(result, expected)
