"""Gradients of dropout."""

from __future__ import annotations

import numpy as np
import tvm
from sweep import TARGET
from tvm import relax, tirx, topi


def gradient(x, legalize=None):
    """Return the result and the gradient of ``sum(cube(dropout(x)))``."""
    param = relax.Var("x", relax.TensorType(x.shape, x.dtype.name))
    bb = relax.BlockBuilder()
    with bb.function("main", [param]):
        with bb.dataflow():
            y = bb.emit(relax.TupleGetItem(bb.emit(relax.op.nn.dropout(param, 0.25)), 0))
            cube = bb.emit(relax.op.multiply(y, relax.op.multiply(y, y)))
            loss = bb.emit_output(relax.op.sum(cube))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    if legalize is not None:
        module = relax.transform.LegalizeOps({"relax.nn.dropout": legalize})(module)
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    loss, (grad,) = machine["main_adjoint"](tvm.runtime.tensor(x))
    return loss.numpy(), grad.numpy()


def test_the_identity_has_the_gradient_of_the_identity():
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    loss, grad = gradient(x)
    np.testing.assert_allclose(loss, (x**3).sum(), 1e-5)
    np.testing.assert_allclose(grad, 3 * x**2, 1e-6)


def test_an_implementation_that_drops():
    """The gradient uses the mask that a forward function returns, including its scale."""

    def drop(bb, call):
        def te_drop(x):
            kept = tirx.const(1 / 0.75, x.dtype), tirx.const(0, x.dtype)
            mask = tvm.te.compute(x.shape, lambda i: tirx.if_then_else(i % 4 != 1, *kept))
            return [topi.multiply(x, mask), mask]

        return bb.call_te(te_drop, call.args[0])

    x = np.random.default_rng(0).normal(size=8).astype("float32")
    mask = np.where(np.arange(8) % 4 != 1, 1 / 0.75, 0)
    loss, grad = gradient(x, drop)
    np.testing.assert_allclose(loss, ((x * mask) ** 3).sum(), 1e-5)
    np.testing.assert_allclose(grad, 3 * (x * mask) ** 2 * mask, 1e-6)
