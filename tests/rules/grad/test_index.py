"""Gradients of the backward operators of indexing, called on their own."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax.op import grad as backward

from relax_grad.testing import check_gradients

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("mode", ["fast", "clip", "wrap", "nan"])
def test_take_backward_and_derivative(mode):
    """Both are linear, so every higher order is one of the two again."""
    x, indices = RNG.normal(size=(3, 4)), np.array([[1, -1], [9, 1]])

    def take_backward(dy, i):
        return backward.take_backward(dy, relax.op.zeros((3, 4), "float64"), i, axis=1, mode=mode)

    def take_jvp(x, i):
        return backward.take_jvp(x, i, axis=1, mode=mode)

    check_gradients(take_backward, [RNG.normal(size=(3, 2, 2)), indices], order=3)
    check_gradients(take_jvp, [x, indices], order=3)
    check_gradients(take_jvp, [x, indices], order=2, symbolic={0: {0: "n", 1: "m"}})


def test_take_backward_without_mode():
    """TVM's own builder leaves the mode empty, which is "fast"."""
    from tvm.relax.op.grad import _ffi_api

    def take_backward(dy, i):
        return _ffi_api.take_backward(dy, relax.op.zeros((4,), "float64"), i, 0)

    check_gradients(take_backward, [RNG.normal(size=(3,)), np.array([-1, 3, 9])], order=2)


def test_gather_elements_backward_and_derivative():
    indices = np.array([[1, 9], [-1, 1], [-9, -9]])

    def gather_backward(dy, i):
        return backward.gather_elements_backward_data(dy, (3, 5), i, axis=1)

    def gather_derivative(x, i):
        return backward.gather_elements_jvp(x, i, axis=1)

    check_gradients(gather_backward, [RNG.normal(size=(3, 2)), indices], order=3)
    check_gradients(gather_derivative, [RNG.normal(size=(3, 4)), indices], order=3)


@pytest.mark.parametrize("assume_inbound", [False, True])
def test_strided_slice_backward_data(assume_inbound):
    def slice_backward(dy):
        return backward.strided_slice_backward_data(
            dy, (7, 3), [0, -1], [1, 1], [7, 3], [2, 1], assume_inbound=assume_inbound
        )

    check_gradients(slice_backward, [RNG.normal(size=(3, 2))], order=3)


def test_dynamic_strided_slice_backward_data():
    """TVM cannot infer a shape of its gradient. The shape of the argument is known."""
    grad = RNG.normal(size=(2, 3))
    bounds = [np.array(bound) for bound in ([-3, 4], [4, -9], [2, -2])]

    def slice_backward(dy, *bounds):
        return backward.dynamic_strided_slice_backward_data(dy, (4, 5), *bounds)

    check_gradients(slice_backward, [grad, *bounds])
    check_gradients(slice_backward, [grad.astype("float16"), *bounds])
