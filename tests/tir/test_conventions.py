"""Conventions at kinks and ties, and the arithmetic of half precision."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tensor_functions import expression, numbers, run
from tvm import relax, te, tirx, topi
from tvm.script import tirx as T

import relax_grad
from relax_grad.tir import adjoint
from relax_grad.topi.binary import log_add_exp

pytestmark = pytest.mark.core


def test_ties():
    a, b = np.array([1.0, 2.0]), np.array([1.0, 1.0])
    for function in (topi.maximum, topi.minimum):
        grads = run(expression(function, (2,), (2,)), a, b)
        np.testing.assert_array_equal(grads[0] + grads[1], [1, 1])
        assert grads[0][0] == grads[1][0] == 0.5
    (shares,) = run(expression(lambda x: topi.max(x, 0), (4,)), np.array([3.0, 1, 3, 3]))
    np.testing.assert_allclose(shares, [1 / 3, 0, 1 / 3, 1 / 3])
    (clipped,) = run(expression(lambda x: topi.clip(x, -1, 1), (4,)), np.array([-1.0, 1, 2, 0]))
    np.testing.assert_array_equal(clipped, [1, 1, 0, 1])
    (relu,) = run(expression(topi.nn.relu, (3,)), np.array([0.0, 1, -1]))
    np.testing.assert_array_equal(relu, [0, 1, 0])


@pytest.mark.parametrize("choice", [tirx.Select, tirx.if_then_else])
def test_infinite_derivatives_of_branches_that_are_not_taken(choice):
    def compute(x):
        zero = tirx.const(0.0, "float64")
        return te.compute((3,), lambda i: choice(x[i] > zero, tirx.sqrt(x[i]), x[i] * zero))

    (grad,) = run(expression(compute, (3,)), np.array([0.0, 4.0, -1.0]))
    np.testing.assert_allclose(grad, [0, 0.25, 0])


def test_products_with_zeros():
    @T.prim_func(s_tir=True)
    def product(A: T.Buffer((2, 3), "float64"), Y: T.Buffer((2,), "float64")):
        for i, k in T.grid(2, 3):
            with T.sblock("product"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    Y[vi] = 1.0
                Y[vi] = Y[vi] * A[vi, vk]

    (grad,) = run(product, np.array([[2.0, 0, 3], [0, 0, 4]]))
    np.testing.assert_array_equal(grad, [[0, 6, 0], [0, 0, 0]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_accumulated_in_float32(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 without it")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    function = expression(lambda x: topi.broadcast_to(x, (4096,)), (1,), dtype=dtype)
    derivative = adjoint(function)
    gradient = tvm.runtime.tensor(np.zeros(1, kind))
    module = tvm.IRModule({"g": derivative.function.with_attr("global_symbol", "g")})
    tvm.compile(module, TARGET)["g"](tvm.runtime.tensor(np.ones(4096, kind)), gradient)
    assert float(gradient.numpy()[0]) == 4096


# NaN and infinities

NAN = np.nan


def test_nan_in_extrema():
    """NaN passes to both arguments of a maximum and through a relu, not through a bound, and
    spreads in a reduction."""
    value = np.array([NAN, 1.0, 2.0])
    for function in (topi.maximum, topi.minimum):
        grads = run(expression(function, (3,), (3,)), value, np.array([0.0, NAN, 2.0]))
        np.testing.assert_array_equal(grads, [[1, 1, 0.5], [1, 1, 0.5]])
    (clipped,) = run(expression(lambda x: topi.clip(x, -1, 1), (3,)), value)
    np.testing.assert_array_equal(clipped, [0, 1, 0])
    (relu,) = run(expression(topi.nn.relu, (3,)), value)
    np.testing.assert_array_equal(relu, [1, 1, 1])
    rows = np.array([[1.0, NAN], [3.0, 3.0], [-np.inf, -np.inf], [np.inf, 0.0]])
    (shares,) = run(expression(lambda x: topi.max(x, 1), (4, 2)), rows)
    np.testing.assert_array_equal(shares, [[NAN, NAN], [0.5, 0.5], [0.5, 0.5], [1, 0]])


@pytest.mark.parametrize("choice", [tirx.Select, tirx.if_then_else])
@pytest.mark.parametrize("comparison", [tirx.LT, tirx.GE])
def test_nan_takes_the_same_branch_backward(choice, comparison):
    """TVM takes ``not x < 0`` for ``0 <= x``, which is false for NaN as well."""

    def compute(x):
        zero, two, three = (tirx.const(number, "float64") for number in (0.0, 2.0, 3.0))
        return te.compute((3,), lambda i: choice(comparison(x[i], zero), x[i] * two, x[i] * three))

    (grad,) = run(expression(compute, (3,)), np.array([NAN, -1.0, 1.0]))
    wanted = [3, 2, 3] if comparison is tirx.LT else [3, 3, 2]
    np.testing.assert_array_equal(grad, wanted)


@pytest.mark.parametrize("choice", [tirx.Select, tirx.if_then_else])
@pytest.mark.parametrize("value", [NAN, np.inf, -np.inf])
def test_invalid_values_of_branches_that_are_not_taken(choice, value):
    def compute(x, y):
        return te.compute((2,), lambda i: choice(x[i] > 0.0, x[i] * x[i], tirx.exp(y[i]) / y[i]))

    grads = run(
        expression(compute, (2,), (2,), dtype="float32"),
        np.array([3, 2], "float32"),
        np.array([value, 0], "float32"),
    )
    np.testing.assert_array_equal(grads, [[6, 4], [0, 0]])


#: Edge cases of operators for which a tensor function has another convention, with the reason.
DIFFERENT = {
    **dict.fromkeys(("std([5])", "std([5, 5])"), "the square root of 0 has an infinite derivative"),
    **dict.fromkeys(
        (
            "max_pool([1, 1, 2, 3], 2)",
            "max_pool([nan, 1, 2, nan], 2)",
            "max_pool([-inf, -inf], 2)",
        ),
        "equal elements share the gradient, as in other maxima",
    ),
    "scatter_max([2, 2], [0, 0], u), u = [2, 2]": "each update shares the gradient with the "
    "value before",
    "log_add_exp([-inf, 1000], [-inf, 1000])": "the branch of equal arguments has the "
    "derivative 1/2 at infinities too, where the "
    "operator has NaN",
    "median([2, 1, 2])": "TVM calls a packed function to sort",
    "nll_loss(x, [0, 2]), of two classes": "elements that are not read have the gradient 0",
}


def _legalized(edge):
    """Return an edge case of an operator as calls of tensor functions, differentiated."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(array.shape, str(array.dtype)))
        for i, array in enumerate(edge.inputs)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            value = bb.emit_output(edge.relax(*params))
        bb.emit_func_output(value)
    return relax_grad.vjp(relax.transform.LegalizeOps()(bb.get()))


@pytest.mark.slow
def test_edges_agree_with_the_operators():
    """The legalization of an operator has the gradient of the operator."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))
    import edges
    import measure_edges

    asked = [edge for edge in edges.edges() if edge.call not in DIFFERENT]
    for edge, wanted in zip(asked, measure_edges.of_relax_grad(asked), strict=True):
        module = _legalized(edge)
        machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
        shape = [int(extent) for extent in module["main_vjp"].params[-1].ty.shape]
        arguments = [*edge.inputs, np.ones(shape)]
        value, gradients = machine["main_vjp"](*map(tvm.runtime.tensor, arguments))
        shown = measure_edges.show(value.numpy(), [grad.numpy() for grad in gradients])
        assert shown == wanted, edge.call


def test_atan2_at_the_origin():
    grads = run(expression(topi.atan2, (2,), (2,)), np.array([0.0, 1.0]), np.array([0.0, 0.0]))
    np.testing.assert_allclose(grads, [[0, 0], [0, -1]], atol=1e-15)


def test_log_add_exp_of_equal_arguments():
    equal = np.array([0.0, 1000.0, -3.0])
    grads = run(expression(lambda a, b: log_add_exp(a, b, (3,)), (3,), (3,)), equal, equal)
    np.testing.assert_array_equal(grads, np.full((2, 3), 0.5))


def test_roots_and_powers_at_zero():
    (root,) = run(expression(topi.sqrt, (2,)), np.array([0.0, 4.0]))
    np.testing.assert_array_equal(root, [np.inf, 0.25])
    base, exponent = np.array([0.0, 0.0, 0.0]), np.array([0.0, 1.0, 2.0])
    grads = run(expression(topi.power, (3,), (3,)), base, exponent)
    np.testing.assert_array_equal(grads, [[0, 1, 0], [0, 0, 0]])
    grads = run(expression(topi.divide, (2,), (2,)), np.array([0.0, 1.0]), np.zeros(2))
    np.testing.assert_array_equal(grads, [[np.inf, np.inf], [NAN, -np.inf]])


# Half precision


@pytest.mark.parametrize(("dtype", "epsilon"), [("float16", 2**-11), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("kind", ["map", "sum", "matrix product", "extremum", "scatter", "scan"])
def test_half_precision_against_float64(dtype, epsilon, kind):
    """A gradient is rounded once: its error is at most a unit in the last place of the largest
    terms."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 without it")
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    compute, shapes = {
        "map": (lambda x: topi.multiply(topi.exp(x), topi.tanh(x)), [(64,)]),
        "sum": (lambda x: topi.sum(topi.multiply(x, x), 1), [(4, 512)]),
        "matrix product": (topi.matmul, [(4, 512), (512, 4)]),
        "extremum": (lambda x: topi.max(x, 0), [(4, 64)]),
        "scatter": (lambda x: te.compute((512,), lambda i: x[i % 3] * x[i % 3]), [(3,)]),
        "scan": (lambda x: topi.cumsum(x, 0, dtype), [(256,)]),
    }[kind]
    values = [np.abs(array).astype(narrow) for array in numbers(*shapes)]
    grads = run(expression(compute, *shapes, dtype=dtype), *values)
    if kind == "scan":
        compute = lambda x: topi.cumsum(x, 0)  # noqa: E731
    exact = run(expression(compute, *shapes), *(array.astype("float64") for array in values))
    for own, wanted in zip(grads, exact, strict=True):
        assert own.dtype == narrow
        np.testing.assert_allclose(own.astype("float64"), wanted, rtol=4 * epsilon)
