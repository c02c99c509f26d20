"""The comparison with PyTorch finds differences, and says where they are."""

from __future__ import annotations

import numpy as np
import pytest

from relax_grad.errors import GradientCheckError
from relax_grad.testing import TorchCase, check_against_torch, check_many_against_torch

X = np.array([[0.5, -1.5, 2.0], [3.0, -0.25, 1.0]])


@pytest.mark.parametrize("through", ["relax_grad", "tvm"])
def test_agreement(torch, through):
    error = check_against_torch("relax.exp", [X], lambda torch, x: torch.exp(x), through=through)
    assert error < 1e-12


def test_an_unknown_pass_is_an_error(torch):
    with pytest.raises(ValueError, match="through must be one of"):
        check_against_torch("relax.exp", [X], lambda torch, x: torch.exp(x), through="torch")


def test_a_different_gradient_fails(torch):
    with pytest.raises(GradientCheckError, match=r"gradient of x0 differs.*\[1, 0\]"):
        check_against_torch(
            "relax.exp", [X], lambda torch, x: x.detach().exp() + 0 * x.sum(), rtol=1e-9
        )


def test_a_different_value_fails(torch):
    with pytest.raises(GradientCheckError, match="the result differs"):
        check_against_torch("relax.exp", [X], lambda torch, x: torch.exp(x) + 1)


def test_a_different_shape_fails(torch):
    with pytest.raises(GradientCheckError, match="output 0 has the shape"):
        check_against_torch("relax.exp", [X], lambda torch, x: torch.exp(x)[:1])


def test_many_name_the_one_that_differs(torch):
    right = TorchCase("relax.exp", [X], lambda torch, x: torch.exp(x))
    clipped = {"min": -1.0, "max": 1.0}
    wrong = TorchCase("relax.clip", [X], lambda torch, x: torch.clip(x, -1, 2), clipped)
    assert check_many_against_torch([right, right]) < 1e-12
    with pytest.raises(GradientCheckError, match=r"relax\.clip: the result.*\(2, 3\).*'max': 1"):
        check_many_against_torch([right, wrong, right])


def test_symbolic_axes(torch):
    def exp(names):
        return TorchCase("relax.exp", [X], lambda torch, x: torch.exp(x), symbolic={0: names})

    assert check_many_against_torch([exp({0: "n"}), exp({1: "n"})]) < 1e-12
    with pytest.raises(ValueError, match="names axis 2 of input 0"):
        check_many_against_torch([exp({2: "n"})])


def test_no_cases():
    assert check_many_against_torch([]) == 0.0
