"""Softmax, log_softmax, their gradients and the gradient of the cross entropy become kernels."""

from __future__ import annotations

import numpy as np
import pytest
from calls import build, tensor
from dispatched import check_dispatch, kernels_in
from tvm import relax, tirx

import relax_grad
from relax_grad.op.activation import log_softmax_backward, softmax_backward

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


@pytest.mark.parametrize("batch", [2, N])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [1, 2])
def test_kernels(name, batch, axis):
    x = tensor("x", (batch, 3, 21), "float32")
    values = [RNG.normal(size=(2, 3, 21)).astype("float32")]
    module = build([x], lambda x: getattr(relax.op.nn, name)(x, axis=axis))
    check_dispatch(module, "main", values, [f"nn_{name}_kernel"])


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("backward", [softmax_backward, log_softmax_backward])
def test_gradient(backward, axis):
    params = [tensor(name, (2, 3, 21), "float32") for name in ("dy", "y")]
    values = [RNG.normal(size=(2, 3, 21)).astype("float32") for _ in params]
    module = build(params, lambda dy, y: backward(dy, y, axis))
    check_dispatch(module, "main", values, [f"grad_{backward.__name__}_kernel"])


def gradient(params, body, wrt):
    module = relax_grad.vjp(build(params, body), "main", wrt)
    module = relax.transform.DeadCodeElimination(["main_vjp"])(module)
    del module["main"]
    return module


@pytest.mark.parametrize("axis", [1, -1])
def test_gradient_of_log_softmax(axis):
    x = tensor("x", (N, 3, 21), "float32")
    values = [RNG.normal(size=(2, 3, 21)).astype("float32") for _ in range(2)]
    module = gradient([x], lambda x: relax.op.nn.log_softmax(x, axis), ["x"])
    kernels = ["nn_log_softmax_kernel", "grad_log_softmax_backward_kernel"]
    check_dispatch(module, "main_vjp", values, kernels)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(N, 21), (N, 3, 5, 7), (21,)], ids=str)
def test_cross_entropy(shape, reduction):
    """With ignored targets and, except where a reduction would make all NaN, targets that name no
    class."""
    batch, classes, inner = shape[: len(shape) - 1][:1], shape[len(shape) > 1], shape[2:]
    params = [
        tensor("x", shape, "float32"),
        tensor("targets", (*batch, *inner), "int32"),
        tensor("weights", (classes,), "float32"),
    ]

    def loss(x, targets, *weights):
        y = relax.BlockBuilder.current().emit(relax.op.nn.log_softmax(x, 1 if batch else 0))
        return relax.op.nn.nll_loss(y, targets, *weights, reduction=reduction, ignore_index=-2)

    sizes = [tuple(4 if extent is N else extent for extent in dims) for dims in (batch, inner)]
    targets = RNG.integers(0, classes, (*sizes[0], *sizes[1])).astype("int32")
    if batch:
        targets[1] = -2
    if batch and reduction == "none":
        targets[..., -1:] = classes + 3
    x = RNG.normal(size=tuple(4 if extent is N else extent for extent in shape)).astype("float32")
    weights = RNG.uniform(1, 2, classes).astype("float32")
    kernels = ["nn_log_softmax_kernel", "grad_cross_entropy_backward_kernel"]
    for inputs in (params, params[:2]):
        module = gradient(inputs, loss, ["x"])
        extents = module["main_vjp"].params[-1].ty.shape.values
        dy = RNG.normal(size=targets.shape if len(extents) else ()).astype("float32")
        values = [x, targets, weights][: len(inputs)]
        check_dispatch(module, "main_vjp", [*values, dy], kernels)


@pytest.mark.parametrize("number", [1, 2])
def test_gathered_logarithms(number):
    """One class for each row, the form of PyTorch's exported cross entropy, runs in one pass."""
    params = [tensor("x", (N, 3, 21), "float32"), tensor("targets", (N, 3, number), "int64")]

    def body(x, targets):
        y = relax.BlockBuilder.current().emit(relax.op.nn.log_softmax(x))
        return relax.op.gather_elements(y, targets, axis=2)

    module = gradient(params, body, ["x"])
    targets = RNG.integers(-21, 21, (4, 3, number))
    values = [RNG.normal(size=(4, 3, 21)), targets, RNG.normal(size=targets.shape)]
    values = [v if v is targets else v.astype("float32") for v in values]
    backward = ["grad_cross_entropy_backward_kernel"]
    if number > 1:
        backward = ["grad_gather_elements_backward_data_kernel", "grad_log_softmax_backward_kernel"]
    check_dispatch(module, "main_vjp", values, ["nn_log_softmax_kernel", *backward])


def test_softmax_along_an_inner_axis_has_no_kernel():
    x = tensor("x", (2, 3, 3), "float32")
    assert kernels_in(build([x], lambda x: relax.op.nn.softmax(x, axis=1))) == []
