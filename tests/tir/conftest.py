"""Fixtures of the tests of tensor functions."""

from __future__ import annotations

import pytest

from relax_grad.autodiff import gradient


@pytest.fixture(autouse=True)
def by_statements(request, monkeypatch):
    """Differentiate functions by their statements, also those that compute an operator."""
    if request.path.name != "test_recognise.py":
        monkeypatch.setattr(gradient, "with_operators", lambda mod: mod)
