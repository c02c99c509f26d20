"""The backward operators of data movement are the adjoints of their forward operators."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.relax.op import grad as backward

from relax_grad.testing import check_gradients

SHAPE = (2, 3)


@pytest.mark.parametrize(
    ("operator", "grad_shape", "attrs"),
    [
        (backward.tile_backward_data, (2, 2, 9), {"repeats": [2, 1, 3]}),
        (backward.tile_backward_data, (0, 3), {"repeats": [0, 1]}),
        (backward.repeat_backward_data, (2, 6), {"repeats": 2, "axis": -1}),
        (backward.repeat_backward_data, (18,), {"repeats": 3}),
        (backward.repeat_backward_data, (0, 3), {"repeats": 0, "axis": 0}),
    ],
)
def test_gradient_of_every_order(operator, grad_shape, attrs):
    def function(grad):
        return operator(grad, SHAPE, **attrs)

    grad = np.random.default_rng(0).normal(size=grad_shape)
    check_gradients(function, [grad], order=2)
    check_gradients(function, [grad.astype("float16")], order=2)


def test_concat_backward_tensors():
    def function(grad):
        return backward.concat_backward_tensors(grad, [(2, 3), (0, 3), (1, 3)], 0)

    check_gradients(function, [np.random.default_rng(0).normal(size=(3, 3))], order=2)
