"""Gradients of the losses, against PyTorch wherever it has them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import value_and_gradients
from sweep import TARGET, at_length, batches
from tvm import relax

from relax_grad.testing import (
    TorchCase,
    check_against_torch,
    check_gradients,
    check_many_against_torch,
)

SWEEP = {"deadline": None, "derandomize": True}
REDUCTIONS = ["none", "sum", "mean"]


@st.composite
def losses(draw, least=0):
    """Draw arguments of nll_loss that PyTorch accepts."""
    num_classes = draw(st.integers(1, 5))
    batch = draw(st.none() | st.integers(least, 4))
    spatial = () if batch is None else tuple(draw(st.lists(st.integers(least, 3), max_size=3)))
    positions = () if batch is None else (batch, *spatial)
    ignore_index = draw(st.sampled_from([-100, 255, -1, 0, num_classes - 1]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    targets = np.where(
        rng.random(positions) < draw(st.sampled_from([0.0, 0.3, 1.0])),
        ignore_index,
        rng.integers(0, num_classes, positions),
    ).astype(draw(st.sampled_from(["int32", "int64"])))
    shape = (num_classes,) if batch is None else (batch, num_classes, *spatial)
    weights = rng.uniform(0.5, 1.5, num_classes) if draw(st.booleans()) else None
    attrs = {"reduction": draw(st.sampled_from(REDUCTIONS)), "ignore_index": ignore_index}
    return rng.normal(size=shape), targets, weights, attrs


def nll_loss_case(predictions, targets, weights, attrs):
    inputs = [predictions, targets] if weights is None else [predictions, targets, weights]

    def reference(torch, x, t, w=None):
        return torch.nn.functional.nll_loss(x, t.long(), None if w is None else w.detach(), **attrs)

    # PyTorch has no gradient of the weights to compare with. NumPy checks it in tests/topi.
    return TorchCase("relax.nn.nll_loss", inputs, reference, attrs, [0])


def nll_loss_as_torch(torch, *case):
    check_many_against_torch([nll_loss_case(*case)])


@settings(max_examples=15, **SWEEP)
@given(losses())
def test_nll_loss_is_torch_s(torch, case):
    nll_loss_as_torch(torch, *case)


@pytest.mark.slow
@at_length(1000)
@given(batches(losses()))
def test_nll_loss_is_torch_s_at_length(torch, batch):
    check_many_against_torch([nll_loss_case(*case) for case in batch], target=TARGET)


@pytest.mark.slow
@settings(max_examples=40, **SWEEP)
@given(losses(least=1))
def test_nll_loss_at_second_order(case):
    predictions, targets, weights, attrs = case
    if not (targets != attrs["ignore_index"]).any():
        attrs["reduction"] = "sum"  # the mean of no targets is NaN
    inputs = [predictions, targets] if weights is None else [predictions, targets, weights]
    check_gradients("relax.nn.nll_loss", inputs, order=2, **attrs)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("ignore_index", [-100, 255, 1])
def test_nothing_but_ignored_targets(torch, reduction, shape, ignore_index):
    """PyTorch's mean is NaN, and its gradient is 0. So is the gradient of the weights."""
    targets = np.full(shape[:1] * (len(shape) > 1) + shape[2:], ignore_index)
    predictions, weights = np.ones(shape), np.ones(3)
    attrs = {"reduction": reduction, "ignore_index": ignore_index}
    nll_loss_as_torch(torch, predictions, targets, weights, attrs)

    def total(*args):
        return relax.op.sum(relax.op.nn.nll_loss(*args, **attrs))

    loss, gradients = value_and_gradients(total, [predictions, targets, weights], [0, 2])
    assert np.isnan(loss) == (reduction == "mean")
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_weights_that_sum_to_zero(torch):
    """The result is 0/0 exactly where PyTorch gives NaN."""
    predictions, targets, weights = np.ones((3, 2)), np.array([0, -100, 0]), np.array([0.0, 1.0])
    nll_loss_as_torch(torch, predictions, targets, weights, {"reduction": "mean"})
    nll_loss_as_torch(torch, predictions, targets, weights, {"reduction": "sum"})


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_ignored_prediction_may_be_anything(torch, value, reduction):
    predictions = np.array([[value, 1.0, value], [2.0, value, value]])
    targets = np.array([1, 0])
    nll_loss_as_torch(torch, predictions, targets, None, {"reduction": reduction})
    predictions[1] = value
    targets[1] = -100
    nll_loss_as_torch(torch, predictions, targets, np.ones(3), {"reduction": reduction})


@pytest.mark.parametrize("invalid", [-1, 3, 255, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_invalid_target_shows(invalid, reduction):
    """PyTorch raises an error. Here the loss is NaN, and so is the gradient of that sample."""
    targets = np.array([0, invalid, 2, -100])
    inputs = [np.ones((4, 3)), targets, np.ones(3)]

    def loss_of(*args):
        return relax.op.nn.nll_loss(*args, reduction=reduction)

    loss, (x_grad, w_grad) = value_and_gradients(loss_of, inputs, [0, 2])
    assert np.isnan(loss)
    assert np.isnan(x_grad[1]).all()
    assert not x_grad[3].any()
    assert np.isnan(w_grad).all()
    if reduction == "sum":
        np.testing.assert_array_equal(x_grad[[0, 2]], [[-1, 0, 0], [0, 0, -1]])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3)])
def test_log_softmax_and_nll_loss_are_torch_s_cross_entropy(torch, reduction, weighted, shape):
    rng = np.random.default_rng(0)
    logits, attrs = 3 * rng.normal(size=shape), {"reduction": reduction, "ignore_index": 255}
    targets = rng.integers(0, shape[1], shape[:1] + shape[2:])
    targets[0] = 255
    weights = rng.uniform(0.5, 1.5, shape[1]) if weighted else None

    def cross_entropy(x, t, *w):
        return relax.op.nn.nll_loss(relax.op.nn.log_softmax(x, axis=1), t, *w, **attrs)

    def reference(torch, x, t, w=None):
        return torch.nn.functional.cross_entropy(x, t, None if w is None else w.detach(), **attrs)

    inputs = [logits, targets] if weights is None else [logits, targets, weights]
    check_against_torch(cross_entropy, inputs, reference, wrt=[0])
    batch = {0: "n"}
    check_gradients(cross_entropy, inputs, order=2, symbolic={0: batch, 1: batch})


def test_large_batch_of_cross_entropy_in_half_precision():
    """The batch size N overflows float16, and 1 / N is subnormal in float16."""
    n = 70000
    x = relax.Var("x", relax.TensorType((n, 1), "float16"))
    y = relax.Var("y", relax.TensorType((n, 1), "float16"))
    dz = relax.Var("dz", relax.TensorType((), "float16"))
    rule = tvm.ir.Op.get("relax.nn.cross_entropy_with_logits").get_attr("FPrimalGradient")
    bb = relax.BlockBuilder()
    with bb.function("main", [dz, x, y]):
        # The forward operator does not compile at this size, so only its gradient runs.
        call = relax.op.nn.cross_entropy_with_logits(x, y)
        bb.emit_func_output(bb.emit(rule(dz, call, dz, bb)[0]))
    machine = relax.VirtualMachine(tvm.compile(bb.get(), target=TARGET), tvm.cpu())
    ones = np.ones((n, 1), "float16")
    result = machine["main"](*map(tvm.runtime.tensor, (np.float16(100), ones, ones))).numpy()
    np.testing.assert_allclose(result, -100 / n, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_stock_form_is_kept_where_it_is_right(dtype):
    """A constant batch in these dtypes needs no backward operator, so later passes see plain
    operators."""
    inputs = [relax.Var(name, relax.TensorType((4, 3), dtype)) for name in "xy"]
    bb = relax.BlockBuilder()
    with bb.function("main", inputs):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.nn.cross_entropy_with_logits(*inputs))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    assert "R.grad" not in module["main_adjoint"].script()
