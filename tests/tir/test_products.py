"""Gradients of products over axes: lanes along the axis, and products side by side."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from programs import run as run_module
from tensor_functions import check, expression, module_of, numbers, run, tensor
from tvm import relax, te, tirx, topi

import relax_grad
from relax_grad.tir import adjoint

pytestmark = pytest.mark.core


def other_factors(x, axes):
    """Return the product of the other factors of each factor, in float64, without division."""
    x = np.asarray(x, "float64")
    products = np.empty_like(x)
    for place in np.ndindex(x.shape):
        rest = x.copy()
        rest[place] = 1
        own = tuple(slice(None) if i in axes else k for i, k in enumerate(place))
        products[place] = rest[own].prod()
    return products


#: Fewer factors than lanes, whole chunks of lanes, and a rest; several axes, and products side by
#: side.
SHAPES = [
    *(((n,), (0,)) for n in (1, 2, 31, 32, 33, 64, 70)),
    *(((3, n), (1,)) for n in (1, 5, 32, 67)),
    *(((n, 5), (0,)) for n in (1, 4, 40)),
    *(((2, 64), (0,)), ((3, 96), (0,)), ((2, 3, 64), (1,)), ((3, 2, 7), (0,))),
    *(((2, 3, 34), (1, 2)), ((2, 3, 4), (0, 1, 2)), ((2, 3, 34), (0, 2)), ((3, 2, 64), (0, 1))),
]


@pytest.mark.parametrize(("shape", "axes"), SHAPES, ids=str)
def test_values_with_zeros(shape, axes):
    """Products without a 0, with one and with several."""
    rng = np.random.default_rng(math.prod(shape))
    function = expression(lambda x: topi.prod(x, axes), shape)
    for share in (0.0, 0.5 / math.prod(shape), 0.05):
        x = rng.uniform(0.7, 1.4, shape) * rng.choice([-1, 1], shape)
        x[rng.random(shape) < share] = 0
        np.testing.assert_allclose(run(function, x)[0], other_factors(x, axes), rtol=1e-12)


@pytest.mark.parametrize("build", ["default", "relax_grad"])
def test_compiled_by_the_pipeline(build):
    x = np.random.default_rng(0).uniform(0.8, 1.25, (6, 70)).astype("float32")
    x[0, 3] = x[1, 3] = x[1, 60] = 0
    derivative = adjoint(expression(lambda x: topi.prod(x, 1), (6, 70), dtype="float32"))
    module = module_of(
        derivative.function,
        lambda bb, f, *args: bb.emit(relax.op.call_tir(f, args, tensor(6, 70, dtype="float32"))),
        *(tensor(*shape, dtype="float32") for shape in ((6, 70), (6,))),
    )
    value = run_module(module, "main", x, np.ones(6, "float32"), pipeline=build)
    np.testing.assert_allclose(value, other_factors(x, (1,)), 1e-5)


def test_second_order():
    check(expression(lambda x: topi.prod(x, 1), (2, 35)), [1 + numbers((2, 35))[0] / 4], tensor(2))
    check(expression(lambda x: topi.prod(x, 0), (4, 3)), numbers((4, 3)), tensor(3))


def test_factors_that_are_expressions_of_two_inputs():
    def compute(x, y):
        k = te.reduce_axis((0, 5), "k")
        product = te.comm_reducer(lambda a, b: a * b, lambda t: tirx.const(1, t))
        return te.compute((3,), lambda i: product(tirx.sin(x[i, k]) + y[k], axis=k))

    check(expression(compute, (3, 5), (5,)), numbers((3, 5), (5,)), tensor(3))


def test_windows_with_a_predicate():
    """Factors out of bounds count as 1, and an element is a factor of several products."""

    def compute(x):
        k = te.reduce_axis((0, 3), "k")
        product = te.comm_reducer(lambda a, b: a * b, lambda t: tirx.const(1, t))
        unit = tirx.const(1.0, "float64")

        def value(i):
            place = i + k - 1
            inside = tirx.all(place >= 0, place < 6)
            return product(tirx.if_then_else(inside, x[place], unit), axis=k)

        return te.compute((6,), value)

    check(expression(compute, (6,)), numbers((6,)), tensor(6))


def test_an_initial_value():
    def compute(x):
        k = te.reduce_axis((0, 4), "k")
        product = te.comm_reducer(lambda a, b: a * b, lambda t: tirx.const(-2.5, t))
        return te.compute((3,), lambda i: product(x[i, k], axis=k))

    check(expression(compute, (3, 4)), numbers((3, 4)), tensor(3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_multiplies_in_float32(dtype):
    """Products of half the factors overflow float16, and the gradients do not."""
    x = np.array([[512.0] * 3 + [2.0**-9] * 3, [0.5, 0, 3, 1, 2, 4]]).astype(dtype)
    (grad,) = run(expression(lambda x: topi.prod(x, 1), (2, 6), dtype=dtype), x)
    np.testing.assert_array_equal(grad.astype("float64"), other_factors(x, (1,)))


@pytest.mark.parametrize("axis", [0, 1])
def test_symbolic_extents(axis):
    n = tirx.Var("n", "int64")
    m = tirx.Var("m", "int64")
    x = te.placeholder((n, m), "float32", "x")
    function = te.create_prim_func([x, topi.prod(x, axis)])
    kind = relax.TensorType((n, m), "float32")
    kinds = kind, relax.TensorType(((n, m)[1 - axis],), "float32")
    module = module_of(
        adjoint(function).function,
        lambda bb, f, *args: bb.emit(relax.op.call_tir(f, args, kind)),
        *kinds,
    )
    target = relax_grad.target.host()
    built = tvm.compile(module, target, relax_pipeline=relax_grad.pipeline(target))
    machine = relax.VirtualMachine(built, tvm.cpu())
    for shape in ((3, 70), (40, 5), (1, 1), (0, 4), (4, 0), (33, 32)):
        value = np.random.default_rng(1).uniform(0.9, 1.1, shape).astype("float32")
        ones = np.ones(shape[1 - axis], "float32")
        grad = machine["main"](*map(tvm.runtime.tensor, (value, ones))).numpy()
        np.testing.assert_allclose(grad, other_factors(value, (axis,)), 1e-5)
