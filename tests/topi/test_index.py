"""The tensor expressions of take, gather_elements and their gradients against loops over
elements."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from indices import (
    MODES,
    element_of,
    expected_reads,
    gather_pairs,
    gathers,
    take_pairs,
    takes,
)
from kernels import Kernel, check_kernels, run
from sweep import TARGET, at_length, batches
from tvm import te, tirx

from relax_grad.topi import index as topi_index


def tolerance_of(dtype):
    return 1e-12 if dtype == "float64" else 1e-3


def take_kernels(x_shape, indices, axis, mode, dtype="float64", symbolic=False):
    plain = 0 if axis is None else axis % len(x_shape)
    x = np.random.default_rng(0).normal(size=x_shape).astype(dtype)
    shape = (*x_shape[:plain], *indices.shape, *x_shape[plain + 1 :])
    taken, grad, expected = expected_reads(
        take_pairs(x_shape, indices, plain, mode), x, shape, dtype
    )
    for fill, wanted in taken.items():
        yield Kernel(
            lambda a, i, fill=fill: topi_index.take(a, i, axis, mode, fill),
            [x, indices],
            wanted,
            dtype,
            symbolic=symbolic,
        )
    # The data are an input only for their shape, which may be symbolic.
    yield Kernel(
        lambda dy, i, a: topi_index.take_backward(dy, i, a.shape, axis, mode),
        [grad, indices, x],
        expected,
        dtype,
        tolerance_of(dtype),
        symbolic,
    )


def gather_kernels(data_shape, indices, axis, dtype="float64", symbolic=False):
    data = np.random.default_rng(0).normal(size=data_shape).astype(dtype)
    pairs = gather_pairs(data_shape, indices, axis % len(data_shape))
    taken, grad, expected = expected_reads(pairs, data, indices.shape, dtype)
    for fill, wanted in taken.items():
        yield Kernel(
            lambda a, i, fill=fill: topi_index.gather_elements(a, i, axis, fill),
            [data, indices],
            wanted,
            dtype,
            symbolic=symbolic,
        )
    yield Kernel(
        lambda dy, i, a: topi_index.gather_elements_backward_data(dy, i, a.shape, axis),
        [grad, indices, data],
        expected,
        dtype,
        tolerance_of(dtype),
        symbolic,
    )


few = settings(max_examples=15, deadline=None, derandomize=True)
EITHER = {"symbolic": st.booleans(), "dtype": st.sampled_from(["float64", "float32", "float16"])}


@few
@given(takes())
def test_take(case):
    check_kernels(take_kernels(*case))


@few
@given(takes())
def test_take_symbolic(case):
    check_kernels(take_kernels(*case, symbolic=True))


@few
@given(gathers())
def test_gather_elements(case):
    check_kernels(gather_kernels(*case))


@few
@given(gathers())
def test_gather_elements_symbolic(case):
    check_kernels(gather_kernels(*case, symbolic=True))


@pytest.mark.slow
@at_length(200)
@given(batches(takes()), st.fixed_dictionaries(EITHER))
def test_take_at_length(batch, either):
    check_kernels((k for case in batch for k in take_kernels(*case, **either)), TARGET)


@pytest.mark.slow
@at_length(200)
@given(batches(gathers()), st.fixed_dictionaries(EITHER))
def test_gather_elements_at_length(batch, either):
    check_kernels((k for case in batch for k in gather_kernels(*case, **either)), TARGET)


@pytest.mark.parametrize("behind", [(1,), (63,), (64,), (65,), (200,), (3, 50), (2, 0)], ids=str)
@pytest.mark.parametrize("symbolic", [False, True])
def test_take_backward_in_pieces(behind, symbolic):
    """The trailing axes are divided among parallel tasks, for any extents."""
    indices = np.array([[2, 0, 2], [-1, 5, -4]])
    check_kernels(take_kernels((2, 3, *behind), indices, 1, "fast", symbolic=symbolic))


def test_a_wrong_result_is_found():
    """The error names the kernel that differs among the kernels compiled together."""
    right, *_ = take_kernels((3,), np.array([2, 0]), 0, "clip")
    wrong = dataclasses.replace(right, expected=right.expected + 1e-9)
    check_kernels([right, right])
    with pytest.raises(AssertionError, match="Kernel"):
        check_kernels([right, wrong])


def test_unsigned_indices_do_not_count_from_the_end():
    for mode in MODES:
        check_kernels(take_kernels((3,), np.array([2**64 - 1, 2**63, 1], "uint64"), 0, mode))
        check_kernels(take_kernels((3,), np.array([2**32 - 1, 2**31, 1], "uint32"), 0, mode))


@pytest.mark.parametrize("mode", MODES)
def test_scalar_index(mode):
    """A scalar index expression acts as an index of rank 0."""
    x, grad = np.arange(12.0).reshape(3, 4), np.array([1.0, 2.0, 3.0])
    for index in (-5, -1, 0, 3, 4):
        where = element_of(index, 4, mode)
        scalar = tirx.IntImm("int64", index)
        result = run(
            lambda a, s=scalar: topi_index.take(a, s, 1, mode, "nan"), [x], (3,), "float64"
        )
        np.testing.assert_array_equal(result, np.full(3, np.nan) if where is None else x[:, where])
        expected = np.zeros((3, 4))
        if where is not None:
            expected[:, where] = grad
        result = run(
            lambda dy, s=scalar: topi_index.take_backward(dy, s, (3, 4), 1, mode),
            [grad],
            (3, 4),
            "float64",
        )
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_are_filled_with_zero(dtype):
    x = te.placeholder((3,), dtype)
    indices = te.placeholder((2,), "int64")
    taken = topi_index.take(x, indices, 0, "fast", "nan")
    kernel = tvm.compile(te.create_prim_func([x, indices, taken]), target=TARGET)
    out = tvm.runtime.tensor(np.ones(2, dtype))
    kernel(tvm.runtime.tensor(np.ones(3, dtype)), tvm.runtime.tensor(np.array([1, 3])), out)
    np.testing.assert_array_equal(out.numpy(), np.array([1, 0], dtype))


def test_half_precision_accumulates_in_float32():
    """A float16 sum of ones would stop at 2048."""
    grad, indices = np.ones(4096, "float16"), np.zeros(4096, "int32")
    for expression in (
        lambda dy, i: topi_index.take_backward(dy, i, (2,), 0, "fast"),
        lambda dy, i: topi_index.gather_elements_backward_data(dy, i, (2,), 0),
    ):
        result = run(expression, [grad, indices], (2,), "float16")
        np.testing.assert_array_equal(result, [4096, 0])


def test_unknown_mode():
    with pytest.raises(ValueError, match=r"mode must be .* but it is 'raise'"):
        topi_index.position(tirx.IntImm("int64", 0), tirx.IntImm("int64", 3), "raise")
