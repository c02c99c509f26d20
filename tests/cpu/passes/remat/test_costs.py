"""Estimates of the time of a call, beside the operations that it computes."""

from __future__ import annotations

import math

import pytest
import tvm
from calls import build, tensor
from tvm.relax import op
from tvm.relax.backend.cpu_generic import pipeline as stages

import relax_grad
from relax_grad.cpu.passes.remat._costs import _BYTES_PER_OPERATION, cost_of
from relax_grad.transform import DispatchKernels

HOST = relax_grad.target.host()


def costs(body, *shapes):
    """Return the costs of the calls of a function."""
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
    module = DispatchKernels(HOST)(build(params, body))
    with HOST:
        module = tvm.transform.Sequential(stages.legalize_passes(HOST))(module)
    bindings = [binding for block in module["main"].body.blocks for binding in block.bindings]
    return [cost for each in bindings if (cost := cost_of(each.value, module)) is not None]


#: A function, the shapes of its arguments and of its result, and its floating-point operations.
PRODUCTS = {
    "matmul": (op.matmul, [(96, 64), (64, 80)], (96, 80), 2 * 96 * 64 * 80),
    "stack": (op.matmul, [(6, 96, 64), (6, 64, 80)], (6, 96, 80), 2 * 6 * 96 * 64 * 80),
    "conv": (
        lambda x, w: op.nn.conv2d(x, w, padding=1),
        [(2, 16, 24, 24), (32, 16, 3, 3)],
        (2, 32, 24, 24),
        2 * (2 * 32 * 24 * 24) * (16 * 9),
    ),
    "attention": (
        op.nn.attention,
        [(2, 64, 4, 32), (2, 192, 4, 32), (2, 192, 4, 32)],
        (2, 64, 4, 32),
        2 * 2 * (2 * 4) * 64 * 192 * 32,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operations_of_products(name):
    body, shapes, result, operations = PRODUCTS[name]
    (cost,) = costs(body, *shapes)
    traffic = 4 * sum(map(math.prod, [*shapes, result]))
    assert cost.time == pytest.approx(traffic + _BYTES_PER_OPERATION * operations)
    assert cost.is_product
    assert not cost.is_cheap
    assert cost.has_batch == (name in ("stack", "attention"))
