"""Biases behind products in half precision are added before the one rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from dispatched import HOST, kernels_in
from programs import build, run, tensor
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

import relax_grad
from relax_grad.ir.dtypes import HALVES
from relax_grad.transform import DispatchKernels

RNG = np.random.default_rng(0)
N, M = (tirx.Var(name, "int64") for name in "nm")
KERNEL = "matmul_kernel"


def half(dtype):
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def linear(bb, x, w, bias):
    return op.add(bb.emit(op.matmul(x, bb.emit(op.permute_dims(w)))), bias)


def module_of(shapes, dtype, body=linear):
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    return build(params, body)


def additions_in(module):
    """Return the number of additions that remain beside kernels."""
    return sum(
        isinstance(binding.value, relax.Call) and binding.value.op == Op.get("relax.add")
        for block in DispatchKernels(HOST)(module)["main"].body.blocks
        for binding in block.bindings
    )


#: The shapes of data, of a weight with an output in each row, and of a bias.
SHAPES = {
    "few rows": [(3, 50), (41, 50), (41,)],
    "tiles": [(2, 35, 70), (45, 70), (45,)],
    "stretches": [(40, 1100), (37, 1100), (1, 37)],
    "one column": [(33, 40), (1, 40), (1,)],
    "one row": [(1, 40), (70, 40), (1, 70)],
    "symbolic rows": [(N, 40), (70, 40), (70,)],
    "all symbolic": [(N, 5, M), (70, M), (70,)],
    "symbolic columns": [(4, 40), (N, 40), (N,)],
}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_linear_layer_is_rounded_once(dtype):
    """The error of each element is half a unit in its last place, and that of the sum."""
    kind = half(dtype)
    epsilon = float(ml_dtypes.finfo(kind).eps)
    for name, shapes in SHAPES.items():
        module = module_of(shapes, dtype)
        assert [kernel.rstrip("0123456789") for kernel in kernels_in(module)] == [KERNEL], name
        assert additions_in(module) == 0, name
        extents = {N: 21, M: 30}
        values = [
            RNG.normal(size=[extents.get(extent, extent) for extent in shape]).astype(kind)
            for shape in shapes
        ]
        result = run(module, "main", *values, target=HOST, pipeline="relax_grad")
        x, w, bias = (value.astype("float64") for value in values)
        wanted = x @ w.T + bias
        # Half a step of the binade of the number, and the error of a sum in float32 of products
        # whose sizes have the sum ``sizes``.
        sizes = np.abs(x) @ np.abs(w).T + np.abs(bias)
        limit = 0.5 * epsilon * 2.0 ** np.floor(np.log2(np.abs(wanted))) + 1e-6 * sizes
        assert np.all(np.abs(result.astype("float64") - wanted) <= limit), name


def test_a_constant_bias_before_the_product():
    bias = relax.const(RNG.normal(size=(20,)).astype("float16"))
    module = module_of(
        [(9, 12), (12, 20)], "float16", lambda bb, a, b: op.add(bias, bb.emit(op.matmul(a, b)))
    )
    assert additions_in(module) == 0


@pytest.mark.parametrize(
    ("shapes", "body"),
    [
        pytest.param(
            [(9, 12), (12, 20), (9, 20)],
            lambda bb, a, b, c: op.add(bb.emit(op.matmul(a, b)), c),
            id="a matrix",
        ),
        pytest.param(
            [(9, 12), (12, 20), (1,)],
            lambda bb, a, b, c: op.add(bb.emit(op.matmul(a, b)), c),
            id="one number",
        ),
        pytest.param(
            [(9, 12), (12, 20), (20,)],
            lambda bb, a, b, c: (lambda p: op.multiply(bb.emit(op.add(p, c)), p))(
                bb.emit(op.matmul(a, b))
            ),
            id="another use",
        ),
        pytest.param(
            [(1, 12), (12, 20), (3, 1, 20)],
            lambda bb, a, b, c: op.add(bb.emit(op.matmul(a, b)), c),
            id="more axes",
        ),
        pytest.param(
            [(12,), (12, 20), (20,)],
            lambda bb, a, b, c: op.add(bb.emit(op.matmul(a, b)), c),
            id="a vector",
        ),
    ],
)
def test_other_additions_stay(shapes, body):
    module = module_of(shapes, "bfloat16", body)
    assert additions_in(module) == 1


def test_other_dtypes_keep_their_additions():
    """In float32, nothing is rounded, and the addition is fused with the calls behind it."""
    for dtype in ("float32", "float64"):
        assert additions_in(module_of(SHAPES["tiles"], dtype)) == 1


def test_a_sum_of_two_products_that_fit_each_other():
    """Of two products of one row, the first adds the second."""

    def body(bb, a, b, c):
        return op.add(bb.emit(op.matmul(a, b)), bb.emit(op.matmul(a, c)))

    module = module_of([(1, 12), (12, 20), (12, 20)], "bfloat16", body)
    assert len(kernels_in(module)) == 2
    assert additions_in(module) == 0
    values = [
        RNG.normal(size=shape).astype(half("bfloat16")) for shape in [(1, 12), (12, 20), (12, 20)]
    ]
    result = run(module, "main", *values, target=HOST, pipeline="relax_grad")
    a, b, c = (value.astype("float64") for value in values)
    np.testing.assert_allclose(result.astype("float64"), a @ b + a @ c, rtol=0.02, atol=0.05)


def test_a_gradient_step():
    """The gradients of data, weight and bias, with an activation behind the layer."""
    shapes = [(6, 5, 24), (17, 24), (17,)]

    def body(bb, x, w, bias):
        y = bb.emit(op.nn.gelu(bb.emit(linear(bb, x, w, bias))))
        return op.sum(bb.emit(op.astype(bb.emit(op.multiply(y, y)), "float32")))

    module = relax_grad.value_and_grad(module_of(shapes, "bfloat16", body))
    del module["main"]
    values = [RNG.normal(size=shape).astype(half("bfloat16")) for shape in shapes]
    ours = run(module, "main_adjoint", *values, target=HOST, pipeline="relax_grad")
    wide = relax_grad.value_and_grad(module_of(shapes, "float32", body))
    exact = run(wide, "main_adjoint", *(value.astype("float32") for value in values))
    for result, wanted in zip([ours[0], *ours[1]], [exact[0], *exact[1]], strict=True):
        error = np.abs(result.astype("float32") - wanted).max()
        assert error <= 0.02 * np.abs(wanted).max()
