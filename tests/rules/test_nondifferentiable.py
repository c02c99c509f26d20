"""Operators without a gradient: constants of the gradient, or refused where a gradient reaches
them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax
from tvm.relax.op.grad import no_grad

from relax_grad.errors import GradientError
from relax_grad.testing import check_gradients

X = np.array([[1.5, -2.25, 0.25], [3.75, 0.5, -0.75]])


def gradient(function, value=X):
    """Return the gradient of ``sum(function(x))``."""
    x = relax.Var("x", relax.TensorType(value.shape, value.dtype.name))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(function(bb, x))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    return machine["main_adjoint"](tvm.runtime.tensor(value))[1][0].numpy()


def test_no_grad_is_a_constant_factor():
    def product(x, held):
        return relax.op.multiply(x, no_grad(relax.op.multiply(held, held)))

    check_gradients(product, [X, X + 5], wrt=[0], order=1)
    slope = gradient(lambda bb, x: relax.op.multiply(x, no_grad(x)))
    np.testing.assert_allclose(slope, X)


@pytest.mark.parametrize("name", ["ceil", "floor", "round", "sign", "trunc"])
def test_a_piecewise_constant_factor_stays_a_factor(name):
    def function(bb, x):
        return relax.op.multiply(x, getattr(relax.op, name)(x))

    expected = np.rint(X) if name == "round" else getattr(np, name)(X)
    np.testing.assert_allclose(gradient(function), expected)


def test_floor_divide_counts_as_a_constant_in_both_arguments():
    def function(bb, x):
        other = relax.op.add(x, relax.const(10.0, "float64"))
        return relax.op.add(relax.op.multiply(x, x), relax.op.floor_divide(other, x))

    np.testing.assert_allclose(gradient(function), 2 * X)


MASKS = {
    "argmax": lambda x: relax.op.argmax(x, axis=1, keepdims=True),
    "argmin": lambda x: relax.op.argmin(x, axis=1, keepdims=True),
    "argsort": relax.op.argsort,
    "bucketize": lambda x: relax.op.bucketize(x, relax.const([0.0, 1.0], "float64")),
    "isnan": relax.op.isnan,
    "isinf": relax.op.isinf,
    "isfinite": relax.op.isfinite,
    "greater": lambda x: relax.op.greater(x, relax.const(0.0, "float64")),
    "logical": lambda x: relax.op.logical_not(
        relax.op.logical_and(relax.op.isnan(x), relax.op.isinf(x))
    ),
    "one_hot": lambda x: relax.op.one_hot(relax.op.argmax(x, axis=1), 1.0, 0.0, 3, 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_constant_factors_of_the_gradient(name):
    """A mask made of the input is a constant of the gradient, with or without a cast to floating
    point."""

    def function(bb, x):
        mask = relax.op.astype(bb.emit(MASKS[name](x)), "float64")
        return relax.op.multiply(bb.emit(relax.op.multiply(x, x)), mask)

    def mask_only(bb, x):
        mask = relax.op.astype(bb.emit(MASKS[name](x)), "float64")
        return relax.op.add(relax.op.multiply(x, relax.op.zeros_like(x)), mask)

    x = relax.Var("x", relax.TensorType(X.shape, "float64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(relax.op.astype(bb.emit(MASKS[name](x)), "float64"))
        bb.emit_func_output(out)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), TARGET), tvm.cpu())
    mask = machine["main"](tvm.runtime.tensor(X)).numpy()
    np.testing.assert_allclose(gradient(function), 2 * X * mask)
    np.testing.assert_allclose(gradient(mask_only), 0 * X)


CREATED = {
    "arange": lambda: relax.op.arange(0, 3, 1, "float64"),
    "eye": lambda: relax.op.eye(2, 3, 0, "float64"),
    "hamming_window": lambda: relax.op.hamming_window(3, True, 0.54, 0.46, "float32"),
    "ones": lambda: relax.op.ones((2, 3), "float64"),
}


@pytest.mark.parametrize("name", CREATED)
def test_created_tensors_do_not_stop_the_pass(name):
    def function(bb, x):
        created = relax.op.astype(bb.emit(CREATED[name]()), "float64")
        return relax.op.multiply(bb.emit(relax.op.multiply(x, x)), bb.emit(created))

    slope = gradient(function)
    assert slope.shape == X.shape
    ratio = slope / (2 * X)
    assert np.isfinite(ratio).all()
    assert (ratio != 0).any()


def test_eye_like_is_a_constant():
    slope = gradient(lambda bb, x: relax.op.multiply(x, relax.op.eye_like(x)))
    np.testing.assert_allclose(slope, np.eye(2, 3))


@pytest.mark.parametrize(
    ("build", "operator", "reason"),
    [
        (
            lambda x: relax.op.unique(x, axis=0),
            "relax.unique",
            "a number that is known at run time only",
        ),
        (
            lambda x: relax.op.call_pure_packed("f", x, ty_args=x.ty),
            "relax.call_pure_packed",
            r"is opaque to TVM \(f\); register a gradient for it",
        ),
        (
            lambda x: relax.op.call_dps_packed("f", (x,), x.ty),
            "relax.call_dps_packed",
            "is opaque to TVM",
        ),
    ],
)
def test_a_result_that_depends_on_its_arguments_is_refused(build, operator, reason):
    with pytest.raises(GradientError, match=f"{operator}, binding '.*': .*{reason}"):
        gradient(lambda bb, x: bb.emit(build(x)))
