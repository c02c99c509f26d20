"""Gradients of vision operators: those without one, and random settings of
multibox_transform_loc."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, one_by_one
from tvm import relax
from versions import REGIONS

from relax_grad.ir.compat import CAN_LEAVE_SOFTMAX_OUT
from relax_grad.testing import check_gradients


@REGIONS
@pytest.mark.parametrize("op", [relax.op.vision.roi_align, relax.op.vision.roi_pool])
def test_regions_have_no_gradient(op):
    x = relax.Var("x", relax.TensorType((1, 1, 3, 4), "float32"))
    rois = relax.Var("rois", relax.TensorType((2, 5), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, rois]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(op(x, rois, 2, 1.0))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    corners = np.array([[0, 0, 0, 3, 2], [0, 1, 1, 2, 2]], "float32")
    values = [np.ones((1, 1, 3, 4), "float32"), corners]
    data_grad, rois_grad = machine["main_adjoint"](*map(tvm.runtime.tensor, values))[1]
    assert data_grad.numpy().sum() == pytest.approx(8)
    np.testing.assert_array_equal(rois_grad.numpy(), 0)


SETTINGS = {
    "clip": st.booleans(),
    "threshold": st.sampled_from([-1.0, 0.0, 0.3]),
    "keep_background": st.booleans(),
    "softmax": st.booleans() if CAN_LEAVE_SOFTMAX_OUT else st.just(True),
    "seed": st.integers(0, 99),
}


def check_multibox(seed, softmax, **attrs):
    if not softmax:
        attrs["apply_softmax"] = False
    rng = np.random.default_rng(seed)
    batch, classes, count = rng.integers(1, 4, 3)
    inputs = [
        rng.normal(size=(batch, classes, count)),
        rng.normal(size=(batch, 4 * count)),
        rng.uniform(-0.5, 1.5, (1, count, 4)),
    ]
    variances = tuple(rng.uniform(0.1, 1, 4))
    check_gradients("relax.vision.multibox_transform_loc", inputs, variances=variances, **attrs)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(**SETTINGS)
def test_multibox_transform_loc(**case):
    check_multibox(**case)


@pytest.mark.slow
@one_by_one(200)
@given(**SETTINGS)
def test_multibox_transform_loc_many(**case):
    check_multibox(**case)


def test_multibox_transform_loc_of_half_precision_does_not_overflow():
    """``exp(12)`` and the boxes overflow float16, but the gradient, ``exp(12)`` times a small size,
    does not."""
    inputs = [
        np.zeros((1, 1, 1)),
        np.array([[0.0, 0.0, 12.0, 12.0]]),
        np.array([[[0.5, 0.5, 0.5 + 2**-10, 0.5 + 2**-10]]]),
    ]
    x = [relax.Var(f"x{i}", relax.TensorType(v.shape, "float16")) for i, v in enumerate(inputs)]
    bb = relax.BlockBuilder()
    with bb.function("main", x):
        with bb.dataflow():
            boxes = relax.TupleGetItem(bb.emit(relax.op.vision.multibox_transform_loc(*x)), 0)
            largest = relax.op.strided_slice(boxes, [2], [3], [4])
            loss = bb.emit_output(relax.op.sum(largest))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", x[1:2])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    values = [tvm.runtime.tensor(v.astype("float16")) for v in inputs]
    slope = machine["main_adjoint"](*values)[1][0].numpy()
    np.testing.assert_allclose(slope[0, 2], np.exp(12) * 2**-11, rtol=2e-3)
