"""The tensor expressions of strided slices and their gradients against Python's slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Kernel, check_kernels, int64, run
from sweep import TARGET, at_length, batches

from relax_grad.topi import index_slice as topi_slice

SMALLEST, LARGEST = np.iinfo("int64").min, np.iinfo("int64").max


def slices(begin, end, strides):
    return tuple(slice(*bounds) for bounds in zip(begin, end, strides, strict=True))


def sliced(shape, begin, end, strides):
    """Return random data and a slice of it, and an output gradient and the expected data
    gradient."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    at = slices(begin, end, strides)
    grad, expected = rng.normal(size=x[at].shape), np.zeros(shape)
    expected[at] = grad
    return x, x[at], grad, expected


def slice_kernels(shape, begin, end, strides, symbolic=False):
    """Yield kernels that slice the leading axes of data of the given shape, forward and
    backward."""
    x, taken, grad, expected = sliced(shape, begin, end, strides)
    begins, steps = list(map(int64, begin)), list(map(int64, strides))
    # Every other axis is negative, counted from the end.
    axes = [axis - len(shape) if axis % 2 else axis for axis in range(len(begin))]
    yield Kernel(
        lambda dy, a: topi_slice.strided_slice_backward_data(
            dy, a.shape, axes, begins, steps, False
        ),
        [grad, x],
        expected,
        symbolic=symbolic,
    )
    yield Kernel(
        lambda a, dy: topi_slice.strided_slice(a, dy.shape, axes, begins, steps),
        [x, grad],
        taken,
        symbolic=symbolic,
    )


def dynamic_kernels(shape, begin, end, strides, symbolic=False):
    x, taken, grad, expected = sliced(shape, begin, end, strides)
    bounds = [np.array(bound, "int64") for bound in (begin, end, strides)]
    yield Kernel(
        topi_slice.dynamic_strided_slice_shape,
        [x, *bounds],
        np.array(taken.shape),
        "int64",
        symbolic=symbolic,
        static=(1, 2, 3),
    )
    yield Kernel(
        lambda a, b, s, dy: topi_slice.dynamic_strided_slice(a, b, s, dy.shape),
        [x, bounds[0], bounds[2], grad],
        taken,
        symbolic=symbolic,
        static=(1, 2),
    )
    yield Kernel(
        lambda dy, a, b, s: topi_slice.dynamic_strided_slice_backward_data(dy, a.shape, b, s),
        [grad, x, bounds[0], bounds[2]],
        expected,
        symbolic=symbolic,
        static=(2, 3),
    )


@st.composite
def cases(draw):
    """Draw a shape, and a slice of each axis with bounds inside, near and far outside."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    bound = st.one_of(st.integers(-9, 9), st.sampled_from([SMALLEST, SMALLEST + 1, LARGEST]))
    # Python's slices do not allow a stride of 0.
    step = st.one_of(st.integers(1, 4), st.integers(-4, -1), st.sampled_from([LARGEST, SMALLEST]))
    return shape, *([draw(kind) for _ in shape] for kind in (bound, bound, step))


@pytest.mark.parametrize("extent", range(1, 7))
def test_every_small_slice_with_a_negative_stride(extent):
    """TVM miscompiles (3 - i) // 2 in an index, so the index of such a slice must avoid this
    form."""
    bounds = [
        (begin, begin - taken * stride, -stride)
        for stride in (1, 2, 3)
        for begin in range(extent)
        for taken in range(1, begin // stride + 2)
    ]
    check_kernels(
        kernel
        for begin, end, stride in bounds
        for kernel in slice_kernels(
            (extent,), [begin], [end if end >= 0 else end - extent], [stride]
        )
    )


few = settings(max_examples=12, deadline=None, derandomize=True)


@few
@given(cases(), st.booleans())
def test_strided_slice(case, symbolic):
    check_kernels(slice_kernels(*case, symbolic))


@few
@given(cases(), st.booleans())
def test_dynamic_strided_slice(case, symbolic):
    check_kernels(dynamic_kernels(*case, symbolic))


@pytest.mark.slow
@at_length(200)
@given(batches(cases()), st.booleans())
def test_strided_slice_at_length(batch, symbolic):
    check_kernels((k for case in batch for k in slice_kernels(*case, symbolic)), TARGET)


@pytest.mark.slow
@at_length(200)
@given(batches(cases()), st.booleans())
def test_dynamic_strided_slice_at_length(batch, symbolic):
    check_kernels((k for case in batch for k in dynamic_kernels(*case, symbolic)), TARGET)


def test_some_axes():
    for symbolic in (False, True):
        check_kernels(slice_kernels((4, 5, 3), [1], [4], [2], symbolic))


def test_assume_inbound_takes_begin_as_it_is_where_something_is_symbolic():
    x, grad = np.zeros((4,)), np.array([1.0, 2.0])

    def backward(dy, a):
        return topi_slice.strided_slice_backward_data(
            dy, a.shape, [0], [int64(-2)], [int64(1)], True
        )

    np.testing.assert_array_equal(run(backward, [grad, x], (4,), "float64"), [0, 0, 1, 2])
    result = run(backward, [grad, x], (4,), "float64", symbolic=True)
    np.testing.assert_array_equal(result, [0, 0, 0, 0])


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
    """Of an output gradient longer than the slice, only the elements that belong to the slice are
    read."""
    result = run(
        lambda dy, b, s: topi_slice.dynamic_strided_slice_backward_data(dy, (4,), b, s),
        [np.ones(9), np.array([begin]), np.array([stride])],
        (4,),
        "float64",
    )
    np.testing.assert_array_equal(result, expected)


def test_stride_of_zero_takes_nothing():
    inputs = [np.zeros((4, 3)), *(np.array(v) for v in ([0, 0], [4, 3], [0, 1]))]
    result = run(topi_slice.dynamic_strided_slice_shape, inputs, (2,), "int64")
    np.testing.assert_array_equal(result, [0, 3])
