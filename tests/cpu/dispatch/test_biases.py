"""Biases behind products and convolutions in half precision are added before the one rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
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


def check_gradients(shapes, body):
    """Compare the gradients of a function in bfloat16 with those in float32, and return its
    module."""
    module = relax_grad.value_and_grad(module_of(shapes, "bfloat16", body))
    del module["main"]
    values = [RNG.normal(size=shape).astype(half("bfloat16")) for shape in shapes]
    ours = run(module, "main_adjoint", *values, target=HOST, pipeline="relax_grad")
    wide = relax_grad.value_and_grad(module_of(shapes, "float32", body))
    exact = run(wide, "main_adjoint", *(value.astype("float32") for value in values))
    for result, wanted in zip([ours[0], *ours[1]], [exact[0], *exact[1]], strict=True):
        error = np.abs(result.astype("float32") - wanted).max()
        assert error <= 0.02 * np.abs(wanted).max()
    return module


def calls_in(module, name="main"):
    """Return the names of the operators that remain beside kernels."""
    return [
        binding.value.op.name
        for block in DispatchKernels(HOST)(module)[name].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op != Op.get("relax.call_tir")
    ]


def additions_in(module):
    """Return the number of additions that remain beside kernels."""
    return calls_in(module).count("relax.add")


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


#: Attributes, shapes of data, weight and bias, and the operator.
CONVOLUTIONS = {
    "direct": ({"padding": 1}, [(2, 19, 9, 11), (21, 19, 3, 3), (1, 21, 1, 1)], "conv2d"),
    "Winograd": ({"padding": 1}, [(N, 35, 27, 25), (33, 35, 3, 3), (33, 1, 1)], "conv2d"),
    "many channels": ({}, [(2, 1200, 5, 6), (18, 1200, 3, 3), (1, 18, 1, 1)], "conv2d"),
    "a product": ({}, [(2, 35, 27, 25), (33, 35, 1, 1), (33, 1, 1)], "conv2d"),
    "a product of one channel": ({}, [(2, 35, 27, 25), (1, 35, 1, 1), (1, 1, 1)], "conv2d"),
    "1x1 images": ({}, [(N, 120, 1, 1), (18, 120, 1, 1), (18, 1, 1)], "conv2d"),
    "few channels": (
        {"strides": 2, "padding": 3},
        [(2, 3, 27, 25), (33, 3, 7, 7), (33, 1, 1)],
        "conv2d",
    ),
    "depthwise": (
        {"groups": 17, "padding": 1},
        [(2, 17, 9, 9), (17, 1, 3, 3), (1, 17, 1, 1)],
        "conv2d",
    ),
    "grouped": (
        {"groups": 3, "dilation": 2},
        [(N, 12, 9, 9), (18, 4, 3, 3), (18, 1, 1)],
        "conv2d",
    ),
    "one axis": ({"strides": 2}, [(2, 12, 21), (18, 12, 3), (18, 1)], "conv1d"),
    "volumes": ({}, [(2, 12, 5, 6, 7), (18, 12, 3, 3, 3), (18, 1, 1, 1)], "conv3d"),
    "transposed": (
        {"strides": 3, "output_padding": 2},
        [(2, 12, 9, 9), (12, 18, 2, 2), (1, 18, 1, 1)],
        "conv2d_transpose",
    ),
    "transposed volumes": (
        {"strides": 2},
        [(2, 5, 3, 4, 5), (5, 6, 3, 3, 2), (6, 1, 1, 1)],
        "conv3d_transpose",
    ),
}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_convolution_is_rounded_once(dtype):
    """The error of each element is half a unit in its last place, and that of the sum."""
    kind = half(dtype)
    epsilon = float(ml_dtypes.finfo(kind).eps)
    for place, (name, (attrs, shapes, operator)) in enumerate(CONVOLUTIONS.items()):
        has_relu = place % 3 == 1

        def body(bb, x, w, bias, operator=operator, attrs=attrs, has_relu=has_relu):
            y = bb.emit(getattr(op.nn, operator)(x, w, **attrs))
            y = op.add(y, bias) if len(bias.ty.shape) % 2 else op.add(bias, y)
            return op.nn.relu(bb.emit(y)) if has_relu else y

        module = module_of(shapes, dtype, body)
        kernels = [kernel.rstrip("0123456789") for kernel in kernels_in(module)]
        assert kernels == [f"nn_{operator}_kernel"], name
        assert calls_in(module) == [], name
        values = [
            RNG.normal(size=[3 if extent is N else extent for extent in shape]).astype(kind)
            for shape in shapes
        ]
        result = run(module, "main", *values, target=HOST, pipeline="relax_grad")
        wide = module_of(shapes, "float64", body)
        exact = [value.astype("float64") for value in values]
        executable = tvm.compile(wide, HOST, relax_pipeline="relax_grad")
        machine = relax.VirtualMachine(executable, tvm.cpu())
        wanted, sizes = (
            machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()
            for inputs in (exact, [np.abs(value) for value in exact])
        )
        binades = 2.0 ** np.floor(np.log2(np.maximum(np.abs(wanted), 1e-30)))
        # Winograd's transforms round sums of the operands.
        limit = 0.5 * epsilon * binades + (4e-6 if name == "Winograd" else 1e-6) * sizes
        assert np.all(np.abs(result.astype("float64") - wanted) <= limit), name


def test_a_convolution_with_another_bias_keeps_its_addition():
    """A number for each column of the images is no bias of channels."""

    def body(bb, x, w, bias):
        return op.add(bb.emit(op.nn.conv2d(x, w)), bias)

    module = module_of([(2, 5, 9, 5), (5, 5, 1, 1), (5,)], "bfloat16", body)
    assert additions_in(module) == 1
    module = module_of([(2, 5, 9, 7), (5, 5, 1, 1), (2, 5, 1, 1)], "bfloat16", body)
    assert additions_in(module) == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_relu_behind_a_linear_layer(dtype):
    """The kernel applies it, with the bits of a call behind the kernel."""
    for name in ("few rows", "tiles", "one column", "symbolic rows"):
        shapes = SHAPES[name]
        module = module_of(shapes, dtype, lambda bb, *x: op.nn.relu(bb.emit(linear(bb, *x))))
        assert "relax.nn.relu" not in calls_in(module), name
        values = [
            RNG.normal(size=[21 if extent is N else extent for extent in shape]).astype(half(dtype))
            for shape in shapes
        ]
        ours, plain = (
            run(mod, "main", *values, target=HOST, pipeline="relax_grad").astype("float32")
            for mod in (module, module_of(shapes, dtype))
        )
        np.testing.assert_array_equal(ours, np.maximum(plain, 0))


def test_nan_behind_a_bias_and_relu():
    """NaN stays NaN, as in PyTorch."""

    def body(bb, x, w, bias):
        return op.nn.relu(bb.emit(op.add(bb.emit(op.nn.conv2d(x, w)), bias)))

    shapes = [(1, 3, 2, 4), (5, 3, 1, 1), (5, 1, 1)]
    for dtype in HALVES:
        x, w, bias = (RNG.normal(size=shape).astype(half(dtype)) for shape in shapes)
        x[0, 1, 1, 2] = np.nan
        module = module_of(shapes, dtype, body)
        result = run(module, "main", x, w, bias, target=HOST, pipeline="relax_grad")
        is_nan = np.isnan(result.astype("float32"))
        assert is_nan[0, :, 1, 2].all()
        assert is_nan.sum() == 5


def test_a_step_of_a_convolution():
    """The gradients of data, weight and bias, with ReLU behind the layer: its mask reads the
    result."""
    shapes = [(3, 6, 9, 8), (17, 6, 3, 3), (17,)]

    def body(bb, x, w, bias):
        bias = bb.emit(op.reshape(bias, (1, 17, 1, 1)))
        y = bb.emit(op.nn.conv2d(x, w, padding=1))
        y = bb.emit(op.nn.relu(bb.emit(op.add(y, bias))))
        return op.sum(bb.emit(op.astype(bb.emit(op.multiply(y, y)), "float32")))

    module = check_gradients(shapes, body)
    assert "relax.nn.relu" not in calls_in(module, "main_adjoint")


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

    check_gradients(shapes, body)
