"""Gradients of element-wise functions: broadcasts, edges, half precision, and unchanged rules of
TVM."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import value_and_gradients
from sweep import TARGET, at_length, batches
from tvm import relax
from tvm.relax.op import _op_gradient as stock
from tvm_ffi import structural_equal

from relax_grad.registry import declarations
from relax_grad.testing import TorchCase, check_gradients, check_many_against_torch

FORWARD = {
    "relax.add": lambda torch, x1, x2: x1 + x2,
    "relax.multiply": lambda torch, x1, x2: x1 * x2,
    "relax.divide": lambda torch, x1, x2: x1 / x2,
    "relax.power": lambda torch, x1, x2: x1**x2,
    "relax.maximum": lambda torch, x1, x2: torch.maximum(x1, x2),
    "relax.minimum": lambda torch, x1, x2: torch.minimum(x1, x2),
    "relax.atan2": lambda torch, x1, x2: torch.atan2(x1, x2),
    "relax.log_add_exp": lambda torch, x1, x2: torch.logaddexp(x1, x2),
    "relax.mod": lambda torch, x1, x2: torch.fmod(x1, x2),
}
RULES = {d.op_name: d.function for d in declarations() if d.attr == "FPrimalGradient"}


@st.composite
def cases(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    operands = []
    for _ in range(2):
        own = [1 if draw(st.booleans()) else extent for extent in shape]
        operands.append(tuple(own[draw(st.integers(0, len(own))) :]))
    # Few values, so that equal arguments, 0 and powers of 0 occur now and then.
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    values = [rng.integers(0, 4, size=own) / 2.0 for own in operands]
    return draw(st.sampled_from(sorted(FORWARD))), values


def torch_case(case):
    op, (x1, x2) = case
    if op in ("relax.divide", "relax.mod"):
        x1, x2 = x1 + 0.3, x2 + 0.5
    return TorchCase(op, [np.asarray(x1), np.asarray(x2)], FORWARD[op])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=cases())
def test_broadcasts(torch, case):
    check_many_against_torch([torch_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(cases()))
def test_broadcasts_at_length(torch, batch):
    check_many_against_torch(list(map(torch_case, batch)), target=TARGET)


def gradients(function, *values):
    """Run the gradient of the sum of a function of tensors."""
    inputs = range(len(values))
    return value_and_gradients(lambda *x: relax.op.sum(function(*x)), values, inputs)[1]


def test_divide_in_half_precision_does_not_overflow():
    """``g * y`` and ``g / x2`` overflow float16, but the gradient does not."""
    for scale, x1, x2 in ((1000.0, 20000.0, 200.0), (1000.0, 1e-4, 0.01)):
        values = [np.array([x], "float16") for x in (scale, x1, x2)]
        slopes = gradients(lambda g, x1, x2: g * (x1 / x2), *values)[2]
        g, x1, x2 = (float(value[0]) for value in values)
        np.testing.assert_allclose(slopes, [-g * x1 / x2**2], rtol=3e-3)


def test_power_of_a_constant_exponent_is_one_more_power():
    """A square needs no comparison with 0, even at second order."""
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            square = bb.emit(relax.op.power(x, relax.const(2.0, "float32")))
            out = bb.emit_output(relax.op.sum(square))
        bb.emit_func_output(out)
    module = relax.transform.Gradient("main")(bb.get())
    script = module["main_adjoint"].script()
    assert "R.where" not in script
    assert "R.log" not in script
    check_gradients(
        lambda x: relax.op.power(x, relax.const(3.0, "float64")), [np.array([0.0, -2.0])], order=3
    )


def test_power_of_zero_in_half_precision():
    x1, x2 = (np.array(x, "float16") for x in ([0, 0, 0, 2], [0, 1, 3, 0]))
    slopes = gradients(relax.op.power, x1, x2)
    np.testing.assert_allclose(slopes[0], [0, 1, 0, 0])
    np.testing.assert_allclose(slopes[1], [0, 0, 0, np.log(2)], rtol=1e-3)


def test_nan_goes_to_both_arguments_of_an_extremum(torch):
    x1, x2 = np.array([np.nan, 1.0]), np.array([1.0, np.nan])
    for op in (relax.op.maximum, relax.op.minimum):
        np.testing.assert_array_equal(gradients(op, x1, x2), np.ones((2, 2)))


def test_integers_have_no_gradient():
    x = np.array([1.5, 2.5])
    i = relax.const(np.array([2, 3], "int64"))

    def function(x):
        even = relax.op.multiply(relax.op.add(i, i), i)
        return relax.op.multiply(x, relax.op.astype(even, "float64"))

    np.testing.assert_array_equal(gradients(function, x), [[8.0, 18.0]])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_number_in_the_place_of_a_tensor(dtype):
    x = np.array([1.0, 2.0], dtype)
    number = tvm.tirx.FloatImm(dtype, 3.0)
    for op, expected in (
        (relax.op.multiply, [3, 3]),
        (relax.op.power, [3, 12]),
        (relax.op.minimum, [1, 1]),
    ):
        slopes = gradients(lambda x, op=op: op(x, number), x)
        np.testing.assert_allclose(slopes, [expected], rtol=1e-3)


def test_a_symbolic_broadcast_to_third_order():
    rng = np.random.default_rng(0)
    check_gradients(
        "relax.multiply",
        [rng.normal(size=(3, 1)), rng.normal(size=(3, 4))],
        order=3,
        symbolic={0: {0: "n"}, 1: {0: "n"}},
    )


PLAIN = {
    "relax.add": stock.add_grad,
    "relax.subtract": stock.subtract_grad,
    "relax.multiply": stock.multiply_grad,
    "relax.divide": stock.divide_grad,
}


@pytest.mark.parametrize("shape2", [(2, 3), (3,), (2, 1)])
@pytest.mark.parametrize("op", PLAIN)
def test_static_float32_stays_as_tvm_has_it(partials_of, op, shape2):
    types = [relax.TensorType(shape, "float32") for shape in ((2, 3), shape2)]
    builder = getattr(relax.op, op.removeprefix("relax."))
    rules = (RULES[op].__wrapped__, PLAIN[op])
    partials, expected = (partials_of(builder, rule, types) for rule in rules)
    assert structural_equal(partials, expected)
