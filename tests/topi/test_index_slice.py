"""The tensor expressions of strided slices and their gradients against Python's slices."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx

from relax_grad.topi import index_slice as topi_slice

SMALLEST, LARGEST = np.iinfo("int64").min, np.iinfo("int64").max


def const(value):
    return tirx.IntImm("int64", value)


def run(expression, inputs, shape, symbolic=False):
    """Compile ``expression(*placeholders)`` and run it."""
    placeholders = [
        te.placeholder(
            [tirx.Var(f"n{i}_{k}", "int64") for k in range(array.ndim)]
            if symbolic and array.dtype.kind == "f"
            else [const(extent) for extent in array.shape],  # int64, as in Relax
            array.dtype.name,
            name=f"x{i}",
        )
        for i, array in enumerate(inputs)
    ]
    result = expression(*placeholders)
    kernel = tvm.compile(te.create_prim_func([*placeholders, result]), target="llvm")
    out = tvm.runtime.tensor(np.full(shape, 7, str(result.dtype)))
    kernel(*map(tvm.runtime.tensor, inputs), out)
    return out.numpy()


def slices(begin, end, strides):
    return tuple(slice(*bounds) for bounds in zip(begin, end, strides, strict=True))


def check_slice(shape, begin, end, strides, symbolic=False):
    """Slice the leading axes of data of the given shape, forward and back."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    taken = x[slices(begin, end, strides)]
    grad = rng.normal(size=taken.shape)
    expected = np.zeros(shape)
    expected[slices(begin, end, strides)] = grad
    begins, steps = list(map(const, begin)), list(map(const, strides))
    # Every other axis is named from the end.
    axes = [axis - len(shape) if axis % 2 else axis for axis in range(len(begin))]
    found = run(
        lambda dy, a: topi_slice.strided_slice_backward_data(
            dy, a.shape, axes, begins, steps, False
        ),
        [grad, x],
        shape,
        symbolic,
    )
    np.testing.assert_array_equal(found, expected)
    found = run(
        lambda a, dy: topi_slice.strided_slice(a, dy.shape, axes, begins, steps),
        [x, grad],
        taken.shape,
        symbolic,
    )
    np.testing.assert_array_equal(found, taken)


def check_dynamic(shape, begin, end, strides, symbolic=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    bounds = [np.array(bound, "int64") for bound in (begin, end, strides)]
    taken = x[slices(begin, end, strides)]
    found = run(topi_slice.dynamic_strided_slice_shape, [x, *bounds], (len(shape),), symbolic)
    np.testing.assert_array_equal(found, taken.shape)
    grad = rng.normal(size=taken.shape)
    found = run(
        lambda a, b, s, dy: topi_slice.dynamic_strided_slice(a, b, s, dy.shape),
        [x, bounds[0], bounds[2], grad],
        taken.shape,
        symbolic,
    )
    np.testing.assert_array_equal(found, taken)
    expected = np.zeros(shape)
    expected[slices(begin, end, strides)] = grad
    found = run(
        lambda dy, a, b, s: topi_slice.dynamic_strided_slice_backward_data(dy, a.shape, b, s),
        [grad, x, bounds[0], bounds[2]],
        shape,
        symbolic,
    )
    np.testing.assert_array_equal(found, expected)


@st.composite
def cases(draw):
    """A shape, and a slice of each of its axes with bounds inside, near and far outside."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    bound = st.one_of(st.integers(-9, 9), st.sampled_from([SMALLEST, SMALLEST + 1, LARGEST]))
    # Python's slices refuse a stride of 0.
    step = st.one_of(st.integers(1, 4), st.integers(-4, -1), st.sampled_from([LARGEST, SMALLEST]))
    return shape, *([draw(kind) for _ in shape] for kind in (bound, bound, step))


@pytest.mark.parametrize("extent", range(1, 7))
def test_every_small_slice_with_a_negative_stride(extent):
    """TVM miscompiles (3 - i) // 2 in an index, which such a slice must not be written with."""
    bounds = [
        (begin, begin - taken * stride, -stride)
        for stride in (1, 2, 3)
        for begin in range(extent)
        for taken in range(1, begin // stride + 2)
    ]
    for begin, end, stride in bounds:
        check_slice((extent,), [begin], [end if end >= 0 else end - extent], [stride])


few = settings(max_examples=12, deadline=None, derandomize=True)
many = settings(max_examples=200, deadline=None)


@few
@given(cases(), st.booleans())
def test_strided_slice(case, symbolic):
    check_slice(*case, symbolic)


@few
@given(cases(), st.booleans())
def test_dynamic_strided_slice(case, symbolic):
    check_dynamic(*case, symbolic)


@pytest.mark.slow
@many
@given(cases(), st.booleans())
def test_many_strided_slices(case, symbolic):
    check_slice(*case, symbolic)


@pytest.mark.slow
@many
@given(cases(), st.booleans())
def test_many_dynamic_strided_slices(case, symbolic):
    check_dynamic(*case, symbolic)


def test_some_axes():
    check_slice((4, 5, 3), [1], [4], [2])
    check_slice((4, 5, 3), [1], [4], [2], symbolic=True)


def test_assume_inbound_takes_begin_as_it_is_where_something_is_symbolic():
    x, grad = np.zeros((4,)), np.array([1.0, 2.0])

    def backward(dy, a):
        return topi_slice.strided_slice_backward_data(
            dy, a.shape, [0], [const(-2)], [const(1)], True
        )

    np.testing.assert_array_equal(run(backward, [grad, x], (4,)), [0, 0, 1, 2])
    np.testing.assert_array_equal(run(backward, [grad, x], (4,), symbolic=True), [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("begin", "stride", "expected"),
    [
        (0, LARGEST, [1, 0, 0, 0]),
        (SMALLEST, 2, [1, 0, 1, 0]),
        (LARGEST, -3, [1, 0, 0, 1]),
        (LARGEST, SMALLEST, [0, 0, 0, 1]),
        (LARGEST, 1, [0, 0, 0, 0]),
        (SMALLEST, -1, [0, 0, 0, 0]),
        (1, 0, [0, 0, 0, 0]),
    ],
)
def test_adversarial_bounds(begin, stride, expected):
    """An output gradient longer than the slice is read where an element was taken, and nowhere else."""
    found = run(
        lambda dy, b, s: topi_slice.dynamic_strided_slice_backward_data(dy, (4,), b, s),
        [np.ones(9), np.array([begin]), np.array([stride])],
        (4,),
    )
    np.testing.assert_array_equal(found, expected)


def test_stride_of_zero_takes_nothing():
    inputs = [np.zeros((4, 3)), *(np.array(v) for v in ([0, 0], [4, 3], [0, 1]))]
    found = run(topi_slice.dynamic_strided_slice_shape, inputs, (2,))
    np.testing.assert_array_equal(found, [0, 3])
