"""Higher orders of the losses."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax
from tvm.relax.op import grad

from relax_grad.testing import check_gradients

REDUCTIONS = ["none", "sum", "mean"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(4,), (2, 3, 2)])
def test_third_order(reduction, shape):
    rng = np.random.default_rng(0)
    num_classes = shape[0 if len(shape) == 1 else 1]
    targets = np.asarray(rng.integers(0, num_classes, shape[:1] * (len(shape) > 1) + shape[2:]))
    targets.reshape(-1)[: targets.size - 1 : 2] = -100
    inputs = [rng.normal(size=shape), targets, rng.uniform(0.5, 1.5, num_classes)]
    check_gradients("relax.nn.nll_loss", inputs, order=3, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_operators_by_themselves(reduction):
    """Their arguments are independent here, unlike in the gradient of the loss."""
    rng = np.random.default_rng(0)
    targets = np.array([0, 2, -100, 2, 1])
    dy = rng.normal(size=targets.shape if reduction == "none" else ())
    inputs = [np.asarray(dy), rng.normal(size=(5, 3)), targets, rng.uniform(0.5, 1.5, 3)]
    for builder in (grad.nll_loss_backward, grad.nll_loss_backward_weights):
        for dtype in ("float64", "float16"):
            cast = [value.astype(dtype) if value.dtype.kind == "f" else value for value in inputs]
            check_gradients(builder, cast, order=2, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_symbolic_third_order(reduction):
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(4, 3)), np.array([0, 2, -100, 1]), rng.uniform(0.5, 1.5, 3)]
    symbolic = {0: {0: "n", 1: "c"}, 1: {0: "n"}, 2: {0: "c"}}
    check_gradients("relax.nn.nll_loss", inputs, order=3, symbolic=symbolic, reduction=reduction)


def second_order(inputs, wrt, **attrs):
    """Return the gradient of the sum of the loss's gradients with respect to the inputs ``wrt``."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(a.shape, a.dtype.name)) for i, a in enumerate(inputs)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            total = None
            for builder in (grad.nll_loss_backward, grad.nll_loss_backward_weights):
                term = bb.emit(relax.op.sum(bb.emit(builder(*params, **attrs))))
                total = term if total is None else bb.emit(relax.op.add(total, term))
            total = bb.emit_output(total)
        bb.emit_func_output(total)
    module = relax.transform.Gradient("main", [params[i] for i in wrt])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    result = machine["main_adjoint"](*(tvm.runtime.tensor(a) for a in inputs))
    return [gradient.numpy() for gradient in result[1]]


def test_nothing_but_ignored_targets_puts_no_nan_into_data():
    inputs = [
        np.asarray(1.0),
        np.ones((2, 3)),
        np.array([-100, -100]),
        np.ones(3),
    ]
    for gradient in second_order(inputs, [1, 3], reduction="mean"):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_invalid_targets_at_second_order(reduction):
    """The gradient is NaN where an invalid target takes part. Nothing crashes."""
    targets = np.array([0, 2**62, -(2**63), -1, 1])
    dy = np.ones(targets.shape if reduction == "none" else ())
    inputs = [dy, np.ones((5, 3)), targets, np.ones(3)]
    dy_grad, x_grad, w_grad = second_order(inputs, [0, 1, 3], reduction=reduction)
    invalid = [False, True, True, True, False] if reduction == "none" else True
    np.testing.assert_array_equal(np.isnan(dy_grad), invalid)
    assert np.isnan(x_grad[1:4]).all()
    assert np.isnan(w_grad).all()


def test_same_double_backward_as_torch(torch):
    """The test covers the arguments that PyTorch differentiates: predictions and the output
    gradient."""
    rng = np.random.default_rng(0)
    x, targets, weights = rng.normal(size=(4, 3)), np.array([0, 2, -100, 1]), rng.uniform(size=3)
    direction = rng.normal(size=(4, 3))
    dy = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    leaf = torch.from_numpy(x).requires_grad_()
    loss = torch.nn.functional.nll_loss(leaf, torch.from_numpy(targets), torch.from_numpy(weights))
    (first,) = torch.autograd.grad(loss, leaf, dy, create_graph=True)
    (wanted,) = torch.autograd.grad(first, dy, torch.from_numpy(direction))

    params = [
        relax.Var(f"x{i}", relax.TensorType(a.shape, a.dtype.name))
        for i, a in enumerate([np.asarray(2.0), x, targets, weights, direction])
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            product = relax.op.multiply(grad.nll_loss_backward(*params[:4]), params[4])
            total = bb.emit_output(relax.op.sum(product))
        bb.emit_func_output(total)
    module = relax.transform.Gradient("main", [params[0]])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    arrays = [np.asarray(2.0), x, targets, weights, direction]
    slope = machine["main_adjoint"](*(tvm.runtime.tensor(a) for a in arrays))[1][0].numpy()
    np.testing.assert_allclose(slope, wanted.numpy(), rtol=1e-12)


def test_cross_entropy_with_a_symbolic_batch_at_third_order():
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(4, 3)), rng.uniform(size=(4, 3))]
    check_gradients(
        "relax.nn.cross_entropy_with_logits",
        inputs,
        order=3,
        symbolic={0: {0: "n"}, 1: {0: "n"}},
    )
