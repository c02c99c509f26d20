"""Values of element-wise functions that TVM computes wrongly or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from calls import value_of
from programs import build, tensor
from programs import run as run_program
from tvm import relax

from relax_grad.testing._program import numpy_dtype
from relax_grad.transform import Gradient


def run(function, *values):
    result = value_of(function, *values)
    assert result.dtype == values[0].dtype
    return result.astype("float64")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_log_add_exp_of_large_arguments(dtype):
    x1 = np.array([200, -200, -np.inf, np.inf, np.inf, -np.inf, np.nan, 1])
    x2 = np.array([200, 0, -np.inf, np.inf, 3, 3, 1, 1.5])
    result = run(relax.op.log_add_exp, *(x.astype(numpy_dtype(dtype)) for x in (x1, x2)))
    tolerance = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(result, np.logaddexp(x1, x2), tolerance, 1e-30)


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        (relax.op.atan2, np.arctan2),
        (relax.op.power, np.power),
        (relax.op.mod, np.fmod),
        (relax.op.log_add_exp, np.logaddexp),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_with_a_broadcast(op, reference, dtype):
    x1 = np.array([[0.75], [2.5]])
    x2 = np.array([0.5, 1.5, 1.0])
    result = run(op, *(x.astype(numpy_dtype(dtype)) for x in (x1, x2)))
    np.testing.assert_allclose(result, reference(x1, x2), rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_ewise_fma(dtype):
    values = [np.array(x).astype(numpy_dtype(dtype)) for x in ([3, 4], [5, 6], [7, 8])]
    np.testing.assert_array_equal(run(relax.op.ewise_fma, *values), [22, 32])


def test_ewise_fma_rounds_once():
    """300 * 300 does not fit float16, but the result does."""
    values = [np.array([x], "float16") for x in (300, 300, -64992)]
    np.testing.assert_array_equal(run(relax.op.ewise_fma, *values), [25008])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_einsum_over_an_empty_axis_is_zero(dtype):
    values = [np.ones(shape).astype(numpy_dtype(dtype)) for shape in ((2, 0), (0, 3))]
    result = run(lambda x1, x2: relax.op.einsum((x1, x2), "ij,jk->ik"), *values)
    np.testing.assert_array_equal(result, np.zeros((2, 3)))


def test_einsum_of_half_precision_accumulates_in_float32():
    ones = np.ones(4096).astype(numpy_dtype("float16"))
    assert run(lambda x: relax.op.einsum((x, x), "i,i->"), ones) == 4096


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_constant_0_keeps_nan(dtype, zero):
    x = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 2, -2], dtype)
    constant = relax.const(zero, dtype)
    with np.errstate(invalid="ignore", divide="ignore"):
        product, quotient = x * np.dtype(dtype).type(zero), np.dtype(dtype).type(zero) / x
    for function, expected in (
        (lambda x: relax.op.multiply(x, constant), product),
        (lambda x: relax.op.multiply(constant, x), product),
        (lambda x: relax.op.divide(constant, x), quotient),
    ):
        result = run(function, x)
        np.testing.assert_array_equal(result, expected)
        is_number = ~np.isnan(expected)
        np.testing.assert_array_equal(
            np.signbit(result)[is_number], np.signbit(expected)[is_number]
        )


@pytest.mark.parametrize("pipeline", ["default", "relax_grad"])
def test_an_infinite_gradient_times_the_constant_0_is_nan(pipeline):
    x = tensor("x", (3,))
    module = build(
        [x],
        lambda bb, x: relax.op.sum(
            relax.op.sqrt(relax.op.multiply(x, relax.const(0.0, "float64")))
        ),
    )
    adjoint = Gradient("main")(module)
    _, (gradient,) = run_program(adjoint, "main_adjoint", np.ones(3), pipeline=pipeline)
    assert np.isnan(gradient).all()
