"""The accuracy page: it lists every operator, and its errors match new measurements."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from machines import of_halves

from relax_grad.testing.check import TOLERANCES
from relax_grad.testing.samples import sampled_operators

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "_measured"
ERRORS = json.loads((FOLDER / "accuracy.json").read_text())["errors"]
HALVES = json.loads((FOLDER / "half_accuracy.json").read_text())["errors"]

#: Factor by which an error on another processor may exceed the error on the page, and the error
#: that counts as none, in epsilons.
FACTOR, NONE = 4.0, 1.0

#: The largest accepted ratio of the error of a kernel in half precision to that of PyTorch's.
HALF_FACTOR = 1.5


@pytest.fixture(scope="module")
def accuracy():
    """Return the benchmark that measures."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("accuracy")


def test_every_operator_is_on_the_page():
    missing = sorted(set(sampled_operators()) - set(ERRORS))
    assert missing == [], f"measure them: make accuracy ARGS='{' '.join(missing)}'"


def test_no_error_exceeds_the_tolerance_of_checks():
    too_large = {
        (name, dtype): error["relative"]
        for name, errors in ERRORS.items()
        for dtype, error in errors.items()
        if not error["relative"] <= TOLERANCES[dtype]
    }
    assert too_large == {}


@pytest.mark.parametrize("name", ["relax.tanh", "relax.nn.softplus"])
def test_errors_are_those_on_the_page(accuracy, torch, name):
    errors = accuracy.measure(name)
    assert errors.keys() == ERRORS[name].keys()
    for dtype, error in errors.items():
        limit = FACTOR * ERRORS[name][dtype]["relative"] + NONE * accuracy.EPSILON[dtype]
        assert error.relative <= limit, dtype


def test_a_gradient_that_is_wrong_has_an_error(accuracy):
    exact = np.array([1.0, 4.0])
    assert accuracy._relative(exact, exact, "x0") == (0.0, "x0")
    assert accuracy._relative(np.array([1.0, 3.0]), exact, "x0") == (0.25, "x0")
    assert np.isnan(accuracy._relative(np.array([np.nan, 4.0]), exact, "x0")[0])


def test_kernels_in_half_precision_have_the_errors_on_the_page(accuracy, torch):
    import half_accuracy as half

    assert {family: list(cases) for family, cases in half.CASES.items()} == {
        family: list(cases) for family, cases in HALVES.items()
    }, "measure them: python benchmarks/run.py half_accuracy --json"
    for family, name in (("products", "batch of products"), ("softmax", "softmax, 256x500")):
        for dtype in half.DTYPES:
            errors = half.measure(half.CASES[family][name], dtype)["relax_grad"]
            on_page = HALVES[family][name][dtype]["relax_grad"]
            for kind, error in errors.items():
                assert error <= FACTOR * on_page[kind], (name, dtype, kind)


def test_no_kernel_in_half_precision_is_less_accurate_than_pytorch():
    worse = {
        (family, name, dtype, kind): (error, libraries["torch"][kind])
        for family, cases in HALVES.items()
        for name, dtypes in cases.items()
        for dtype, libraries in dtypes.items()
        for kind, error in libraries["relax_grad"].items()
        if error > HALF_FACTOR * libraries["torch"][kind]
    }
    assert worse == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["products", "convolutions", "attention", "recurrent"])
def test_tiles_are_no_less_accurate_than_pytorch(accuracy, torch, family):
    """Kernels for a processor with tiles (AMX)."""
    import half_accuracy as half

    target = of_halves("amx")
    for name, case in half.CASES[family].items():
        errors = half.measure(case, "bfloat16", target)
        for kind, error in errors["relax_grad"].items():
            assert error <= HALF_FACTOR * errors["torch"][kind], (name, kind, errors)


def test_the_figure_is_drawn_from_the_errors(accuracy, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws the figure")
    import _figures

    kept = (FOLDER / "accuracy.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in kept:
        pytest.skip("another version of matplotlib drew the figure of the page")
    _figures.draw_accuracy({"errors": ERRORS}, tmp_path)
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert "```{chart} accuracy\n" in page
    drawn = (tmp_path / "accuracy.svg").read_text()
    assert drawn == kept, "python benchmarks/run.py accuracy --draw"
