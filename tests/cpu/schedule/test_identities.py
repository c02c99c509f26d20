"""Expressions with cancellation become functions without it, and other expressions stay
unchanged."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm_ffi
from machines import Run, run_kernels
from tvm import te, tirx, topi

from relax_grad.cpu.schedule import _identities as identities
from relax_grad.cpu.schedule import schedule
from relax_grad.cpu.target import CPU, host

X, Y = (tirx.Var(name, "float32") for name in "xy")
ROOT = math.sqrt(0.5)


def c(value: float):
    return tirx.const(value, "float32")


S, T = tirx.sigmoid(X), tirx.sigmoid(X * c(3))


def erf(x):
    return tirx.erf(x * c(ROOT))


def inner(x):
    return c(math.sqrt(2 / math.pi)) * (x + c(0.044715) * tirx.power(x, c(3)))


def density(x):
    return tirx.exp(c(-0.5) * x * x) * c(1 / math.sqrt(2 * math.pi))


def names_in(expr) -> list[str]:
    """Return the names of the functions that the pass finds in an expression."""
    names = []
    result = identities.with_functions(expr, lambda _: True)
    tvm_ffi.structural_walk(
        result, (identities.Call, lambda call: names.append(identities.name_of(call)))
    )
    return [name.removeprefix("relax_grad.") for name in names if name.startswith("relax_grad.")]


SAME = {
    "TVM's gelu": (X * (c(0.5) + erf(X) * c(0.5)), ["gelu"]),
    "gelu of a sum": ((X + Y) * (c(1) + erf(X + Y)) * c(0.5), ["gelu"]),
    "gelu by a division": (c(0.5) * X * (c(1) + tirx.erf(X / c(math.sqrt(2)))), ["gelu"]),
    "gelu of a product": ((X * Y) * (erf(X * Y) + c(1)), ["gelu"]),
    "its derivative": (Y * (c(0.5) + c(0.5) * erf(X) + X * density(X)), ["gelu_slope"]),
    "the distribution": (c(0.5) + c(0.5) * erf(X), ["normal_cdf"]),
    "gelu_tanh": (c(0.5) * X * (c(1) + tirx.tanh(inner(X))), ["gelu_tanh"]),
    "silu": (Y * (X * tirx.sigmoid(X)), ["silu"]),
    "its slope": (Y * (S + X * S * (c(1) - S)), ["silu_slope"]),
    "its slope, written out": (Y * S + ((Y * X) * S) * (c(1) - S), ["silu_slope"]),
    "its slope, as a rule writes it": ((X * S) * (c(1) - S) + S, ["silu_slope"]),
    "the slope of silu of a product": (T + X * c(3) * (T * (c(1) - T)), ["silu_slope"]),
    "softplus": (tirx.log(c(1) + tirx.exp(X)), ["softplus"]),
    "expm1": (tirx.exp(X) - c(1), ["expm1"]),
    "gelu of gelu": (
        (X * (c(1) + erf(X))) * (c(1) + erf(X * (c(1) + erf(X)))),
        ["gelu", "gelu"],
    ),
}

OTHER = {
    "two arguments": X * (c(0.5) + erf(Y) * c(0.5)),
    "no distribution": c(0.5) + c(0.25) * erf(X),
    "another scale": X * (c(1) + tirx.erf(X * c(0.5))),
    "another cube": X * (c(1) + tirx.tanh(c(0.8) * (X + c(0.04) * X * X * X))),
    "the sigmoid of another": X * tirx.sigmoid(Y),
    "another slope": S + X * S * (c(2) - S),
    "the slope of another scale": S + c(2) * X * S * (c(1) - S),
    "the slope of two arguments": S + X * T * (c(1) - T),
    "another sum": tirx.log(c(2) + tirx.exp(X)),
    "another difference": tirx.exp(X) - c(2),
    "float64": tirx.exp(tirx.Var("z", "float64")) - tirx.const(1.0, "float64"),
}


@pytest.mark.parametrize("name", SAME)
def test_identities_are_recognised(name):
    expr, wanted = SAME[name]
    assert names_in(expr) == wanted


@pytest.mark.parametrize("name", OTHER)
def test_other_expressions_are_not_identities(name):
    assert not {"gelu", "gelu_tanh", "silu_slope", "softplus", "expm1"} & set(names_in(OTHER[name]))


def test_a_derivative_of_another_scale_is_not_recognised():
    expr = c(0.5) + c(0.5) * erf(X) + X * density(X) * c(2)
    assert names_in(expr) == ["normal_cdf"]


def compiled(function, *arrays):
    cpu = CPU.of(host())
    taken = [te.placeholder(array.shape, "float32", f"x{i}") for i, array in enumerate(arrays)]
    scheduled = schedule(te.create_prim_func([*taken, function(*taken)]), cpu)
    ((result,),) = run_kernels([Run(scheduled, arrays, [arrays[0].shape])], host())
    return result


def test_a_factor_that_is_left_multiplies_the_function():
    x, y = np.random.default_rng(0).normal(size=(2, 64)).astype("float32")

    def function(x, y):
        return te.compute(
            x.shape, lambda i: y(i) * (x(i) * c(3)) * (c(2) + erf(x(i) * c(3)) * c(2))
        )

    wanted = 3.0 * y * x * 2 * (1 + np.vectorize(math.erf)(3.0 * x * ROOT))
    np.testing.assert_allclose(compiled(function, x, y), wanted, rtol=2e-6, atol=1e-9)


def test_a_function_under_a_condition_reads_nothing_that_the_condition_guards():
    x = np.linspace(1, 2, 64).astype("float32")

    def function(x):
        def element(i):
            before = tirx.log(c(1) + tirx.exp(x(i - 1)))
            return tirx.if_then_else(i > 0, tirx.Select(x(i) > c(1.5), before, x(i)), c(0))

        return te.compute(x.shape, element)

    wanted = np.where(x > 1.5, np.log1p(np.exp(np.roll(x, 1).astype("float64"))), x)
    np.testing.assert_allclose(compiled(function, x)[1:], wanted[1:], rtol=1e-6)


def test_functions_under_a_condition_are_vectors():
    x = np.linspace(-3, 3, 64).astype("float32")
    result = compiled(lambda x: topi.nn.softplus(x, 1.0, 2.0), x)
    wide = x.astype("float64")
    np.testing.assert_allclose(result, np.where(wide > 2, wide, np.log1p(np.exp(wide))), rtol=3e-7)
