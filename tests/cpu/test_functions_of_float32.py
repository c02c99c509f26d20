"""Errors of float32 functions and their gradients under the pipeline: at every exponent, and at and
beyond edges."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from sweep import SHARE

ROOT = Path(__file__).parents[2]
PAGE = json.loads((ROOT / "docs" / "_measured" / "functions.json").read_text())["errors"]

#: The error bound in units in the last place, from float64 or from PyTorch's float32.
LIMIT = 4.0

#: The largest accepted ratio to the error in docs: fewer numbers have smaller errors, other
#: processors other ones.
MORE = 1.5

#: PyTorch's gradient of selu at NaN is NaN in vectors, but the gradient of a positive number in
#: short tensors.
UNSPECIFIED = {"selu": np.isnan}


@pytest.fixture(scope="module")
def functions(torch):
    """The benchmark module that measures errors."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("functions")


def check(functions, name: str, count: int, length: int | None = None) -> None:
    for kind, measured in functions.measure(name, count, length):
        nearest = np.minimum(measured.errors, measured.beside_torch)
        wrong = ~(nearest <= LIMIT + measured.accepted)
        if name in UNSPECIFIED and kind != "value":
            wrong &= ~UNSPECIFIED[name](measured.exact)
        places = np.flatnonzero(wrong)[:5]
        shown = [
            (measured.values[i], measured.exact[i], measured.torch[i], nearest[i]) for i in places
        ]
        assert not shown, f"{kind} of {name}: {shown}"


@pytest.mark.parametrize("name", PAGE)
def test_errors_at_every_exponent(functions, name):
    check(functions, name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGE)
def test_errors_at_thousands_of_numbers_of_every_exponent(functions, name):
    check(functions, name, max(100, round(2000 * SHARE)))


@pytest.mark.parametrize("name", ["erf", "gelu", "tanh", "sigmoid", "softplus", "power"])
def test_few_numbers_that_fill_no_vector(functions, name):
    check(functions, name, 8, length=11)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "softplus", "exp", "sigmoid"])
def test_errors_at_a_million_numbers_of_the_tail(functions, name):
    x = np.linspace(-14, 0, 2**20, dtype="float32")
    function = functions.FUNCTIONS[name]
    wide = x.astype("float64")
    exact = function.exact(wide) if function.exact else functions._of_torch(function, [wide])
    errors = functions.ulps(functions._results(function, [x])[0], exact[0])
    assert errors.max() <= LIMIT, f"{errors.max()} at {x[errors.argmax()]}"


def test_every_function_is_on_the_page(functions):
    assert list(PAGE) == list(functions.FUNCTIONS)


@pytest.mark.parametrize("name", ["erf", "gelu", "softplus"])
def test_errors_are_those_on_the_page(functions, name):
    for kind, measured in functions.measure(name, 32):
        page = PAGE[name][kind]["relax_grad"]
        assert page is None or measured.errors.max() <= MORE * page + 0.5


def test_a_distance_covers_nan_and_infinity(functions):
    inf, nan = np.inf, np.nan
    values = np.array([1 + 2**-22, inf, nan, nan, 3.4e38, -inf, inf], "float32")
    exact = np.array([1.0, inf, nan, 1.0, inf, inf, 2.0**128 - 2.0**100])
    assert functions.ulps(values, exact).tolist() == [2, 0, 0, inf, inf, inf, 0]
    # Subnormal numbers share one spacing.
    assert functions.ulps(np.array([0.0], "float32"), np.array([2.0**-148])).tolist() == [2]


def test_erf_and_gelu_beyond_saturation(functions):
    x = np.array([4, 5, 1e4, 1e10, np.inf, -4, -1e4, -1e10, -np.inf, np.nan], "float32")
    erf, gelu = (functions._results(functions.FUNCTIONS[name], [x])[0] for name in ("erf", "gelu"))
    np.testing.assert_array_equal(erf, [1] * 5 + [-1] * 4 + [np.nan])
    assert gelu[2:5].tolist() == x[2:5].tolist()
    np.testing.assert_array_equal(gelu[6:], [0, 0, np.nan, np.nan])
    np.testing.assert_allclose(gelu[5], -4 * 3.16712418e-5, rtol=1e-6)
