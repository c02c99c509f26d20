"""Corrections of functions that TVM writes in Python."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tvm import relax
from tvm.relax.training.optimizer import SGD, Adam, MomentumSGD, Optimizer

import relax_grad
from relax_grad.ir import corrections


def parameter(dtype: str) -> relax.Var:
    return relax.Var("w", relax.TensorType((3, 4), dtype))


@pytest.mark.parametrize("make", [SGD, MomentumSGD, Adam])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_optimizers_have_a_dtype_that_numpy_knows(make, dtype):
    """NumPy 2.3 refuses the type of a parameter as a dtype, and earlier releases warn of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = make(0.1, *([0.9] if make is MomentumSGD else [])).init(parameter(dtype))
        function = optimizer.get_function()
    assert optimizer.dtype == dtype
    kinds = {np.dtype(str(state.dtype)) for state in optimizer.state}
    assert kinds <= {np.dtype("int64"), np.dtype(dtype)}
    assert len(function.params) == 3


def test_the_checks_of_parameters_are_tvms():
    with pytest.raises(ValueError, match="floating point dtype"):
        Adam(0.1).init(parameter("int32"))
    with pytest.raises(ValueError, match="should have the same dtype"):
        Adam(0.1).init([parameter("float32"), parameter("float64")])


def test_uninstall_restores_tvms_function(monkeypatch):
    corrected = Optimizer._set_params_and_dtype
    try:
        relax_grad.uninstall()
        assert Optimizer._set_params_and_dtype is corrections._set_params_and_dtype
    finally:
        relax_grad.install()
    assert Optimizer._set_params_and_dtype is corrected

    def mine(self, params):
        pass

    monkeypatch.setattr(Optimizer, "_set_params_and_dtype", mine)
    corrections.uninstall()  # a function that a user put there stays
    assert Optimizer._set_params_and_dtype is mine
