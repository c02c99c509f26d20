"""Fixtures and hooks of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import relax_grad  # noqa: F401  (registers the gradients that the tests check)
from relax_grad.testing._program import without_assertions

pytest_plugins = ["cpu_times", "slices", "steady_draws", "time_limit"]

#: Folders and files whose tests compile functions without the assertions on their arguments, which are half of the
#: code. The assertions stay on for every operator in testing/test_samples.py, and for whole programs in
#: cpu/test_pipeline.py, training/ and the examples.
WITHOUT_ASSERTIONS = (
    *("backend/", "cpu/dispatch/", "cpu/schedule/", "gpu/", "legalize/", "op/"),
    *("rules/", "tir/", "topi/"),
    *("autodiff/test_composition.py", "autodiff/test_gradient_pass.py"),
    *("autodiff/test_imported_steps.py", "cpu/test_functions_of_float32.py"),
    *("cpu/test_random_pipelines.py", "test_edges.py", "test_functional.py"),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    if not path.startswith(WITHOUT_ASSERTIONS):
        return (yield)
    with without_assertions():
        return (yield)


def pytest_report_header() -> str:
    try:
        import torch
    except ImportError:
        return "torch: not installed, parity tests are skipped"
    return f"torch: {torch.__version__}"


@pytest.fixture(scope="session")
def torch():
    """Return PyTorch, or skip the test if it is not installed."""
    return pytest.importorskip("torch", reason="PyTorch is not installed: no parity to check")
