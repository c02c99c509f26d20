"""Operators that control differentiation and compute nothing."""

from __future__ import annotations

import numpy as np
import pytest
from programs import build, is_sound, run, tensor
from tvm import relax

import relax_grad
from relax_grad.op import stop_gradient

X = np.array([0.5, -1.0, 2.0])


@pytest.mark.parametrize("gradient", [relax.transform.Gradient, relax_grad.transform.Gradient])
def test_stop_gradient(gradient):
    module = build(
        [tensor("x", (3,))],
        lambda bb, x: relax.op.sum(relax.op.multiply(x, bb.emit(stop_gradient(relax.op.exp(x))))),
    )
    adjoint = gradient("main")(module)
    is_sound(adjoint)
    assert "stop_gradient" not in relax.transform.LegalizeOps()(adjoint).script()
    value, (found,) = run(adjoint, "main_adjoint", X)
    np.testing.assert_allclose(value, np.sum(X * np.exp(X)))
    np.testing.assert_allclose(found, np.exp(X))


def test_stop_gradient_of_what_is_no_tensor():
    pair = relax.Var("pair", relax.TupleType([tensor("a", ()).ty]))
    with pytest.raises(TypeError, match="data must be a tensor"):
        relax.BlockBuilder().normalize(stop_gradient(pair))
