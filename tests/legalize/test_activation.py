"""The legalization of prelu over a symbolic axis, which TVM refuses, and of the gradients of
softmax and log_softmax."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax, tirx
from tvm.s_tir import dlight


def legalize(shape, slopes, axis):
    params = [
        relax.Var("x", relax.TensorType(shape, "float32")),
        relax.Var("alpha", relax.TensorType(slopes, "float32")),
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(relax.op.nn.prelu(*params, axis))
        bb.emit_func_output(result)
    return relax.transform.LegalizeOps()(bb.get())


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("shared", [True, False])
def test_symbolic_axis(axis, shared):
    n = tirx.Var("n", "int64")
    machine = relax.VirtualMachine(
        tvm.compile(legalize((2, n), (1 if shared else n,), axis), TARGET), tvm.cpu()
    )
    x = np.array([[-2, -1, 0], [1, 2, -3]], "float32")
    alpha = np.array([0.5] if shared else [0.5, 0.25, 2], "float32")
    result = machine["main"](*map(tvm.runtime.tensor, (x, alpha))).numpy()
    np.testing.assert_array_equal(result, np.where(x > 0, x, alpha * x))


@pytest.mark.parametrize(
    ("slopes", "message"), [((3,), "must have the extent 1 or n"), ((1, 1), "one dimension")]
)
def test_slopes_that_may_not_fit_are_refused(slopes, message):
    with pytest.raises(ValueError, match=f"prelu: alpha .*{message}"):
        legalize((2, tirx.Var("n", "int64")), slopes, 1)


@pytest.mark.parametrize("name", ["softmax_backward", "log_softmax_backward"])
def test_gradient_of_softmax_has_a_schedule_for_gpus(name):
    """A single kernel computes the sum of a row and then the row."""
    rows = relax.TensorType((tirx.Var("n", "int64"), 256), "float32")
    params = [relax.Var(name, rows) for name in ("output_grad", "output")]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        bb.emit_func_output(bb.emit(getattr(relax.op.grad, name)(*params)))
    rules = (dlight.gpu.GEMV(), dlight.gpu.GeneralReduction(), dlight.gpu.Fallback())
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        module = dlight.ApplyDefaultSchedule(*rules)(relax.transform.LegalizeOps()(bb.get()))
    (kernel,) = (f for f in module.functions.values() if isinstance(f, tirx.PrimFunc))
    assert kernel.script().count('thread="blockIdx.x"') == 1
