"""no_grad within a differentiated function."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax.op.grad import no_grad

from relax_grad.testing import check_gradients


def test_no_grad_is_a_constant_factor():
    """d(x * stop(x)) is stop(x): half of what the plain square gives, and linear at second order."""
    x = np.array([1.5, -2.0, 0.25])

    def product(x, held):
        return relax.op.multiply(x, no_grad(relax.op.multiply(held, held)))

    check_gradients(product, [x, np.array([3.0, 4.0, 5.0])], wrt=[0], order=1)
