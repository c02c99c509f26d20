"""Gradients of casts: the dtypes that let the gradient pass."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax


def gradient(function, dtype="float32"):
    """Return the gradient of the sum of a function of one parameter, and the differentiated
    module."""
    x = relax.Var("x", relax.TensorType((3,), dtype))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            wide = relax.op.astype(bb.emit(function(x)), "float32")
            loss = bb.emit_output(relax.op.sum(bb.emit(wide)))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", [x])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    value = tvm.runtime.tensor(np.array([-1.5, 0.25, 2.0], dtype))
    return machine["main_adjoint"](value)[1][0].numpy(), module


@pytest.mark.parametrize("cast", [relax.op.astype, relax.op.wrap_param])
@pytest.mark.parametrize("through", ["float16", "bfloat16", "float32", "float64"])
def test_floating_point_passes_the_gradient(cast, through):
    grad, _ = gradient(lambda x: cast(x, through), "float16")
    assert grad.dtype == "float16"
    assert grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("cast", [relax.op.astype, relax.op.wrap_param])
@pytest.mark.parametrize("through", ["int8", "int32", "int64", "uint8", "bool"])
def test_integers_and_booleans_pass_no_gradient(cast, through):
    grad, _ = gradient(lambda x: cast(x, through))
    assert grad.dtype == "float32"
    assert grad.tolist() == [0, 0, 0]


def test_a_cast_to_the_same_dtype_costs_nothing():
    _, module = gradient(lambda x: relax.op.astype(x, "float32"))
    assert module["main_adjoint"].script().count("R.astype") == 2  # those of the forward function


def test_an_integer_branch_leaves_the_other_one():
    def function(x):
        level = relax.op.astype(relax.op.astype(x, "int32"), "float32")
        return relax.op.multiply(x, level)

    grad, _ = gradient(function)
    assert grad.tolist() == [-1, 0, 2]  # the level, as a constant
