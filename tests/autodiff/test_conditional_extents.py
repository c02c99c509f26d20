"""Extents with a condition, as TVM infers for bounds that may be negative: ``x[:n - 1]``."""

from __future__ import annotations

import numpy as np
import pytest
from dispatched import HOST, run_both
from programs import is_sound, run
from tvm import relax
from tvm.script import from_source
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from versions import CONDITIONAL_EXTENTS

import relax_grad
from relax_grad.testing import check_gradients
from relax_grad.transform import Gradient

pytestmark = CONDITIONAL_EXTENTS

X = np.random.default_rng(0).normal(size=(5, 4))


def first(x):
    n = x.ty.shape[0]
    part = relax.op.strided_slice(relax.op.exp(x), [0], [0], [n - 1])
    return relax.op.multiply(part, relax.op.strided_slice(x, [0], [0], [n - 1]))


def last(x):
    n = x.ty.shape[0]
    return relax.op.square(relax.op.strided_slice(x, [0], [n - 3], [n]))


@pytest.mark.parametrize("function", [first, last])
def test_slices_to_second_order(function):
    check_gradients(function, [X], order=2, symbolic={0: {0: "n"}})


def test_windows_that_may_be_cut_off():
    x = np.random.default_rng(0).normal(size=(2, 3, 7))
    attrs = {"pool_size": 2, "strides": 3, "ceil_mode": True}
    check_gradients("relax.nn.max_pool1d", [x], order=2, symbolic={0: {2: "n"}}, **attrs)


@I.ir_module
class Module:
    @R.function
    def shifted(x: R.Tensor(("n", 4), "float64")):
        n = T.int64()
        with R.dataflow():
            y = R.exp(R.strided_slice(x, axes=[0], begin=[0], end=[n - 1]))
            s: R.Tensor((), "float64") = R.sum(y)
            R.output(s)
        return s

    @R.function
    def main(x: R.Tensor(("n", 4), "float64"), c: R.Tensor((), "bool")):
        n = T.int64()
        cls = Module
        y = R.sin(R.strided_slice(x, axes=[0], begin=[0], end=[n - 2]))
        if c:
            z = R.multiply(y, R.strided_slice(x, axes=[0], begin=[0], end=[n - 2]))
            r = R.sum(z)
        else:
            r = R.sum(R.square(R.strided_slice(x, axes=[0], begin=[n - 3], end=[n])))
        a: R.Tensor((), "float64") = cls.shifted(x)
        loss: R.Tensor((), "float64") = R.add(r, a)
        return loss


@pytest.mark.parametrize("taken", [True, False])
def test_conditionals_and_calls(taken):
    adjoint = Gradient("main", "x")(Module)
    is_sound(adjoint)
    _, (grad,) = run(adjoint, "main_adjoint", X, np.array(taken))
    np.testing.assert_allclose(grad, gradient(taken), rtol=1e-12)


@pytest.mark.parametrize("taken", [True, False])
def test_the_pipeline_fuses_them(taken):
    """TVM's FuseOps mistakes the condition of an extent for a call of an operator."""
    adjoint = Gradient("main", "x")(Module)
    arguments = (X, np.array(taken))
    _, (grad,) = run(adjoint, "main_adjoint", *arguments, target=HOST, pipeline="relax_grad")
    np.testing.assert_allclose(grad, gradient(taken), rtol=1e-12)


def test_the_pipeline_finds_kernels_behind_them():
    """A visitor of the function's calls meets the condition inside a type, which is a call too."""
    module = from_source("""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("b", "n", 4), "float32"), gamma: R.Tensor((4,), "float32")):
        b = T.int64()
        n = T.int64()
        with R.dataflow():
            h = R.strided_slice(R.tanh(x), [1], [0], [n - 1])
            y = R.nn.layer_norm(h, gamma, R.zeros((4,), "float32"), axes=[-1])
            R.output(y)
        return y
""")
    adjoint = Gradient("main", cotangents=True)(module)
    rng = np.random.default_rng(1)
    arguments = [X[np.newaxis], rng.normal(size=4), rng.normal(size=(1, 4, 4))]
    arguments = [array.astype("float32") for array in arguments]
    (_, ours), (_, stock) = run_both(adjoint, "main_adjoint", arguments)
    for result, wanted in zip(ours, stock, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)
    assert not ours[0][:, -1].any()


def gradient(taken):
    wanted = np.zeros_like(X)
    if taken:
        wanted[:-2] += np.cos(X[:-2]) * X[:-2] + np.sin(X[:-2])
    else:
        wanted[-3:] += 2 * X[-3:]
    wanted[:-1] += np.exp(X[:-1])
    return wanted


def test_forward_mode():
    module = relax_grad.jvp(Module, "main", "x")
    tangent = np.random.default_rng(1).normal(size=X.shape)
    _, product = run(module, "main_jvp", X, np.array(False), tangent)
    wanted = (2 * X * tangent)[-3:].sum() + (np.exp(X) * tangent)[:-1].sum()
    np.testing.assert_allclose(product, wanted, rtol=1e-12)
