"""Gradients of the activations: at their special points, and against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import value_and_gradients
from sweep import TARGET, at_length, batches
from tvm import relax

from relax_grad import GradientError
from relax_grad.testing import (
    TorchCase,
    check_against_torch,
    check_gradients,
    check_many_against_torch,
)


def relu_gradient(x):
    param = relax.Var("x", relax.TensorType(x.shape, x.dtype.name))
    bb = relax.BlockBuilder()
    with bb.function("main", [param]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.nn.relu(param))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    return machine["main_adjoint"](tvm.runtime.tensor(x))[1][0].numpy()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_relu_at_its_special_points(dtype):
    x = np.array([-1, -0.0, 0.0, 1, -np.inf, np.inf, np.nan], dtype)
    grad = relu_gradient(x)
    assert grad.dtype == dtype
    assert grad.tolist() == [0, 0, 0, 1, 0, 1, 1]


def test_relu_of_nan_is_that_of_torch(torch):
    x = np.array([0.0, np.nan, -1.0, 2.0])
    leaf = torch.tensor(x, requires_grad=True)
    torch.relu(leaf).sum().backward()
    assert relu_gradient(x).tolist() == leaf.grad.tolist()


def gradients(op, inputs, dtype, **attrs):
    """Return the gradients of ``sum(op(...))``, computed in a dtype that represents the inputs
    exactly."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(np.shape(value), "float32"))
        for i, value in enumerate(inputs)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            narrow = [bb.emit(relax.op.astype(param, dtype)) for param in params]
            result = bb.emit(op(*narrow, **attrs))
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.astype(result, "float32"))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", params)(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    values = [tvm.runtime.tensor(np.asarray(value, "float32")) for value in inputs]
    return [tensor.numpy() for tensor in machine["main_adjoint"](*values)[1]]


SMOOTH = {
    "gelu": (relax.op.nn.gelu, {}, lambda F, x: F.gelu(x)),
    "gelu_tanh": (relax.op.nn.gelu_tanh, {}, lambda F, x: F.gelu(x, approximate="tanh")),
    "selu": (relax.op.nn.selu, {}, lambda F, x: F.selu(x)),
    "silu": (relax.op.nn.silu, {}, lambda F, x: F.silu(x)),
    "softplus": (relax.op.nn.softplus, {}, lambda F, x: F.softplus(x)),
    "softplus, steep": (
        relax.op.nn.softplus,
        {"beta": 4.0, "threshold": 8.0},
        lambda F, x: F.softplus(x, 4.0, 8.0),
    ),
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 1.6e-2), ("float32", 1e-6)]
)
@pytest.mark.parametrize("name", SMOOTH)
def test_accuracy_and_range(torch, name, dtype, tolerance):
    op, attrs, forward = SMOOTH[name]
    # Multiples of 1/4, and large numbers: bfloat16 holds them all.
    x = np.concatenate([np.arange(-48, 49) / 4, [-3e4, -100, -20, 20, 100, 3e4]])
    x = torch.tensor(x).bfloat16().double().numpy()
    leaf = torch.tensor(x, requires_grad=True)
    forward(torch.nn.functional, leaf).sum().backward()
    (grad,) = gradients(op, [x], dtype, **attrs)
    np.testing.assert_allclose(grad, leaf.grad.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SMOOTH)
def test_the_largest_numbers_of_float32(name):
    op, attrs, _ = SMOOTH[name]
    x = np.array([-3e38, -1e25, -1e20, 1e20, 1e25, 3e38])
    (grad,) = gradients(op, [x], "float32", **attrs)
    assert np.abs(grad[:3]).tolist() == [0, 0, 0]
    slope = 1.0507009873554805 if name == "selu" else 1.0
    np.testing.assert_allclose(grad[3:], [slope] * 3, rtol=1e-6)


@pytest.mark.parametrize("name", SMOOTH)
def test_nan_and_infinity_as_in_torch(torch, name):
    op, attrs, forward = SMOOTH[name]
    x = np.array([np.nan, np.inf, -np.inf])
    leaf = torch.tensor(x, requires_grad=True)
    forward(torch.nn.functional, leaf).sum().backward()
    (grad,) = gradients(op, [x], "float32", **attrs)
    np.testing.assert_allclose(grad, leaf.grad.numpy(), rtol=1e-6)


def test_second_order_of_selu_where_its_exponential_overflows():
    report = check_gradients("relax.nn.selu", [np.array([-2.0, 800.0, 1e30])], order=2)
    assert np.isfinite(report.max_error)


@pytest.mark.parametrize("slopes", [1, 2])
def test_prelu_sums_half_precision_in_float32(slopes):
    x = np.full((4096, 2), -1.0)
    alpha = np.full(slopes, 0.25)
    x_grad, alpha_grad = gradients(relax.op.nn.prelu, [x, alpha], "float16", axis=1)
    assert (x_grad == 0.25).all()
    assert alpha_grad.tolist() == [-4096.0 * 2 / slopes] * slopes


def test_prelu_refuses_slopes_of_two_dimensions():
    x, alpha = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("x", (2, 3)), ("alpha", (1, 3)))
    )
    bb = relax.BlockBuilder()
    with bb.function("main", [x, alpha]):
        with bb.dataflow():
            result = bb.emit(relax.op.nn.prelu(x, alpha))
            loss = bb.emit_output(relax.op.sum(result))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match=r"relax\.nn\.prelu.*alpha must have one dimension"):
        relax.transform.Gradient("main")(bb.get())


@st.composite
def prelu_cases(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    slopes = shape[axis] if draw(st.booleans()) else 1
    return shape, axis, slopes


def prelu_case(case):
    shape, axis, slopes = case
    rng = np.random.default_rng(0)

    def forward(torch, x, alpha):
        slope = alpha.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])
        return torch.where(x > 0, x, slope * x)

    inputs = [rng.normal(size=shape), rng.normal(size=slopes)]
    return TorchCase("relax.nn.prelu", inputs, forward, {"axis": axis})


@settings(max_examples=10, deadline=None, derandomize=True)
@given(case=prelu_cases())
def test_prelu(torch, case):
    check_many_against_torch([prelu_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(prelu_cases()))
def test_prelu_at_length(torch, batch):
    check_many_against_torch(list(map(prelu_case, batch)), target=TARGET)


def test_long_axis_in_half_precision():
    """TVM sums in float16, where the sum stops growing. The gradient must not stop."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 8192)).astype("float16")
    cotangent = rng.uniform(size=x.shape).astype("float16")
    wide, c = x.astype("float64"), cotangent.astype("float64")
    y = np.exp(wide) / np.exp(wide).sum()
    for name, wanted in (
        ("log_softmax", c - c.sum() * y),
        ("softmax", (c - (c * y).sum()) * y),
    ):

        def inner_product(x, c, name=name):
            product = relax.op.multiply(getattr(relax.op.nn, name)(x), c)
            return relax.op.sum(relax.op.astype(product, "float32"))

        _, (grad,) = value_and_gradients(inner_product, [x, cotangent], [0])
        assert grad.dtype == np.float16
        np.testing.assert_allclose(grad, wanted, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["log_softmax", "softmax"])
def test_masked_logits(torch, name):
    """A logit of -inf, as masks give, has probability 0 and gradient 0."""
    x = np.array([[0.5, -np.inf, 1.0], [2.0, -1.0, -np.inf]])
    mask = np.isfinite(x).astype("float64")

    def forward(x, mask):
        exponential = relax.op.exp if name == "log_softmax" else relax.op.negative
        return relax.op.multiply(exponential(getattr(relax.op.nn, name)(x)), mask)

    def reference(torch, x, mask):
        exponential = torch.exp if name == "log_softmax" else torch.neg
        return exponential(getattr(torch, name)(x, -1)) * mask

    check_against_torch(forward, [x, mask], reference, wrt=[0])


@st.composite
def softmax_cases(draw):
    """Draw the operator, a shape, an axis, and the kind of numbers."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    return (
        draw(st.sampled_from(["softmax", "log_softmax"])),
        shape,
        draw(st.integers(-len(shape), len(shape) - 1)),
        draw(st.sampled_from(["normal", "large", "equal", "masked"])),
        draw(st.integers(0, 2**16)),
    )


def softmax_case(case):
    name, shape, axis, kind, seed = case
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    if kind == "large":
        x *= 300
    elif kind == "equal":
        x = np.floor(x)
    elif kind == "masked":
        x = np.where(rng.random(shape) < 0.3, -np.inf, x)
    return TorchCase(
        f"relax.nn.{name}",
        [x],
        lambda torch, x: getattr(torch, name)(x, axis),
        {"axis": axis},
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=softmax_cases())
def test_softmax_is_torch_s(torch, case):
    check_many_against_torch([softmax_case(case)])


@pytest.mark.slow
@at_length(2000)
@given(batch=batches(softmax_cases()))
def test_softmax_is_torch_s_at_length(torch, batch):
    check_many_against_torch([softmax_case(case) for case in batch], target=TARGET)
