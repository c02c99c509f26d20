"""Drawn modules with state, attributes, ties, NaN, views and custom gradients train and run as in
PyTorch, in batches of drawn sizes, while a loop changes them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from sweep import share  # noqa: E402

from ._drawn_modules import check_training, check_wrapped  # noqa: E402

#: Seeds of the suite that runs always.
FEW = 4

#: The end of the seeds of each check in the sweeps.
MORE = 240


@pytest.mark.parametrize("seed", range(FEW))
@pytest.mark.parametrize("check", [check_training, check_wrapped])
def test_some_modules(check, seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", share(range(FEW, MORE)))
@pytest.mark.parametrize("check", [check_training, check_wrapped])
def test_more_modules(check, seed):
    check(seed)
