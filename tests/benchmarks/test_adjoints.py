"""Each case of the benchmark of tensor functions has an adjoint, which takes the arguments that the
benchmark gives."""

from __future__ import annotations

import pytest
from adjoints import CASES, function_of

from relax_grad.tir import adjoint


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_an_adjoint(name):
    build, shapes, limit = CASES[name]
    derivative = adjoint(function_of(build, shapes))
    assert len(derivative.function.params) == len(derivative.takes) + len(derivative.wrt)
    assert len(derivative.wrt) == sum(not isinstance(shape[0], str) for shape in shapes)
    assert limit > 1
