"""What all tests share."""

from __future__ import annotations

import pytest

import relax_grad  # noqa: F401  (registers the gradients that the tests check)


def pytest_report_header() -> str:
    try:
        import torch
    except ImportError:
        return "torch: not installed, parity tests are skipped"
    return f"torch: {torch.__version__}"


@pytest.fixture(scope="session")
def torch():
    """PyTorch, or a skip where it is not installed."""
    return pytest.importorskip("torch", reason="PyTorch is not installed: no parity to check")
