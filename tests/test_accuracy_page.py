"""The accuracy page: it lists every operator, and its errors match new measurements."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from relax_grad.testing.check import TOLERANCES
from relax_grad.testing.samples import sampled_operators

ROOT = Path(__file__).parents[1]
ERRORS = json.loads((ROOT / "docs" / "_measured" / "accuracy.json").read_text())["errors"]

#: Factor by which an error on another processor may exceed the error on the page, and the error
#: that counts as none, in epsilons.
FACTOR, NONE = 4.0, 1.0


@pytest.fixture(scope="module")
def accuracy():
    """Return the module of the program that measures."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    path = ROOT / "benchmarks" / "accuracy.py"
    spec = importlib.util.spec_from_file_location("accuracy", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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


def test_the_figure_is_drawn_from_the_errors(accuracy, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib draws the figure")
    folder = ROOT / "docs" / "_measured"
    if f"Matplotlib v{matplotlib.__version__}," not in (folder / "accuracy_light.svg").read_text():
        pytest.skip("another version of matplotlib drew the figure of the page")
    accuracy.draw({"errors": ERRORS}, tmp_path)
    page = (ROOT / "docs" / "accuracy.md").read_text()
    for kind in ("light", "dark"):
        name = f"accuracy_{kind}.svg"
        assert f"_measured/{name}" in page
        drawn = (tmp_path / name).read_text()
        assert drawn == (folder / name).read_text(), "python benchmarks/accuracy.py --plot"
