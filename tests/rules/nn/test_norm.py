"""Gradients of the normalisations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax, tirx

from relax_grad.testing import (
    TorchCase,
    check_against_torch,
    check_gradients,
    check_many_against_torch,
)

batch_norm = relax.op.nn.batch_norm


def make_inputs(shape, axis, dtype="float64", mean=0.5, seed=0):
    """Return the data, gamma of both signs, beta, the moving mean and the moving variance."""
    rng = np.random.default_rng(seed)
    channels = shape[axis]
    inputs = [
        rng.normal(mean, 1.0, shape),
        rng.choice([-1.0, 1.0], channels) * rng.uniform(0.5, 1.5, channels),
        rng.normal(size=channels),
        rng.normal(size=channels),
        rng.uniform(0.5, 1.5, channels),
    ]
    return [value.astype(dtype) for value in inputs]


def cotangents(shape, axis, dtype="float64", statistics=True):
    rng = np.random.default_rng(1)
    weight = 1.0 if statistics else 0.0
    shapes = (shape, shape[axis], shape[axis])
    grads = [rng.normal(size=s) * w for s, w in zip(shapes, (1.0, weight, weight), strict=True)]
    return [grad.astype(dtype) for grad in grads]


def reference(inputs, grads, axis, training, center=True, scale=True, epsilon=1e-5, momentum=0.1):
    """Return the gradients in float64 by the chain rule, one step of the forward function at a
    time."""
    x, gamma, beta, moving_mean, moving_var = (np.asarray(v, "float64") for v in inputs)
    y_grad, new_mean_grad, new_var_grad = (np.asarray(v, "float64") for v in grads)
    x = np.moveaxis(x, axis, -1)
    rows, y_grad = x.reshape(-1, x.shape[-1]), np.moveaxis(y_grad, axis, -1)
    dy = y_grad.reshape(rows.shape)
    n = len(rows)
    mean, var = (rows.mean(0), rows.var(0)) if training else (moving_mean, moving_var)
    sigma = np.sqrt(var + epsilon)
    normalized = (rows - mean) / sigma
    d_normalized = dy * gamma if scale else dy
    d_sigma = -(d_normalized * normalized).sum(0) / sigma
    d_var = d_sigma / (2 * sigma)
    d_mean = -d_normalized.sum(0) / sigma
    dx = d_normalized / sigma
    d_moving_mean, d_moving_var = new_mean_grad, new_var_grad
    if training:
        d_mean, d_var = d_mean + momentum * new_mean_grad, d_var + momentum * new_var_grad
        d_moving_mean, d_moving_var = (1 - momentum) * d_moving_mean, (1 - momentum) * d_moving_var
        dx = dx + d_mean / n + d_var * 2 * (rows - mean) / n
    else:
        d_moving_mean, d_moving_var = d_moving_mean + d_mean, d_moving_var + d_var
    return [
        np.moveaxis(dx.reshape(x.shape), -1, axis),
        (dy * normalized).sum(0) if scale else np.zeros_like(gamma),
        dy.sum(0) if center else np.zeros_like(beta),
        d_moving_mean,
        d_moving_var,
    ]


def assert_close(actual, expected, tolerance):
    for got, wanted in zip(actual, expected, strict=True):
        scale = max(1.0, np.abs(wanted).max(initial=0.0))
        np.testing.assert_allclose(got.astype("float64"), wanted, tolerance, tolerance * scale)


def build(function, shape, axis, dtype="float32", batch=None):
    """Return a module whose ``main`` returns the sum of ``function(bb, *params)``."""
    extents = list(shape)
    if batch is not None:
        extents[0] = batch
    channels = [extents[axis]]
    params = [relax.Var("x", relax.TensorType(extents, dtype))]
    names = ("gamma", "beta", "moving_mean", "moving_var")
    params += [relax.Var(name, relax.TensorType(channels, dtype)) for name in names]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(function(bb, *params))))
        bb.emit_func_output(loss)
    return bb.get()


def run(module, name, inputs):
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    return machine[name](*map(tvm.runtime.tensor, inputs))


def first_result(**attrs):
    def function(bb, *params):
        y = bb.emit(relax.TupleGetItem(bb.emit(batch_norm(*params, **attrs)), 0))
        return bb.emit(relax.op.multiply(y, relax.op.tanh(y)))

    return function


def test_forward_is_as_the_rule_says():
    """Momentum weighs the new statistics, and the stored variance is the biased one."""
    x, gamma, beta, mean, var = inputs = make_inputs((4, 3, 2), 1)

    def forward(**attrs):
        params = [
            relax.Var(f"x{i}", relax.TensorType(v.shape, "float64")) for i, v in enumerate(inputs)
        ]
        bb = relax.BlockBuilder()
        with bb.function("main", params):
            bb.emit_func_output(bb.emit(batch_norm(*params, axis=1, momentum=0.3, **attrs)))
        return [value.numpy() for value in run(bb.get(), "main", inputs)]

    _, new_mean, new_var = forward(training=True)
    np.testing.assert_allclose(new_mean, 0.7 * mean + 0.3 * x.mean((0, 2)))
    np.testing.assert_allclose(new_var, 0.7 * var + 0.3 * x.var((0, 2)))
    y, same_mean, same_var = forward(training=False)
    np.testing.assert_array_equal(same_mean, mean)
    np.testing.assert_array_equal(same_var, var)
    bare, _, _ = forward(training=False, center=False, scale=False)
    np.testing.assert_allclose(y, bare * gamma[:, None] + beta[:, None])


@pytest.mark.parametrize(
    ("training", "center", "scale"), list(itertools.product((True, False), repeat=3))
)
def test_every_result_contributes(run_rule, training, center, scale):
    attrs = {"center": center, "scale": scale, "epsilon": 0.01, "momentum": 0.3}
    inputs, grads = make_inputs((3, 4, 2), 1), cotangents((3, 4, 2), 1)
    results = run_rule(batch_norm, inputs, grads, axis=1, training=training, **attrs)
    assert_close(results, reference(inputs, grads, 1, training, **attrs), 1e-12)
    if not center:
        assert not results[2].any()
    if not scale:
        assert not results[1].any()


@st.composite
def cases(draw):
    rank = draw(st.integers(1, 5))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    return (
        shape,
        draw(st.integers(-rank, rank - 1)),
        draw(st.booleans()),
        {
            "center": draw(st.booleans()),
            "scale": draw(st.booleans()),
            "epsilon": draw(st.sampled_from([1e-5, 1e-2, 0.5])),
            "momentum": draw(st.sampled_from([0.0, 0.1, 0.9, 1.0])),
        },
    )


def torch_case(case):
    """Return the case of all three results with respect to all five arguments, by the
    definition."""
    shape, axis, training, attrs = case
    own = [extent if i == axis % len(shape) else 1 for i, extent in enumerate(shape)]
    others = [i for i in range(len(shape)) if i != axis % len(shape)]

    def forward(torch, x, gamma, beta, moving_mean, moving_var):
        mean, var = moving_mean.reshape(own), moving_var.reshape(own)
        if training:
            mean = x.mean(others, keepdim=True) if others else x
            var = (x - mean).square()
            var = var.mean(others, keepdim=True) if others else var
        y = (x - mean) / (var + attrs["epsilon"]).sqrt()
        y = y * gamma.reshape(own) if attrs["scale"] else y
        y = y + beta.reshape(own) if attrs["center"] else y
        if not training:
            return y, moving_mean, moving_var
        new, kept = attrs["momentum"], 1 - attrs["momentum"]
        return (
            y,
            kept * moving_mean + new * mean.reshape(-1),
            kept * moving_var + new * var.reshape(-1),
        )

    inputs = make_inputs(shape, axis)
    return TorchCase(
        "relax.nn.batch_norm", inputs, forward, {"axis": axis, "training": training, **attrs}
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape_and_axis(torch, case):
    check_many_against_torch([torch_case(case)])


@pytest.mark.slow
@at_length(1000)
@given(batch=batches(cases()))
def test_any_shape_and_axis_at_length(torch, batch):
    check_many_against_torch([torch_case(case) for case in batch], target=TARGET)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (3, 2, 4), (2, 3, 2, 2), (2, 2, 2, 1, 3)], ids=str)
def test_same_as_torch(torch, shape, training):
    def forward(torch, x, gamma, beta, mean, var):
        mean, var = mean.detach().clone(), var.detach().clone()
        return torch.nn.functional.batch_norm(x, mean, var, gamma, beta, training, eps=1e-3)

    def first(*args, **attrs):
        return relax.TupleGetItem(batch_norm(*args, **attrs), 0)

    check_against_torch(
        first,
        make_inputs(shape, 1),
        forward,
        wrt=[0, 1, 2],
        axis=1,
        training=training,
        epsilon=1e-3,
    )


def test_order_3():
    check_gradients(
        "relax.nn.batch_norm", make_inputs((3, 2, 2), 1), order=3, axis=1, training=True
    )


@pytest.mark.parametrize("training", [True, False])
def test_symbolic_channels(training):
    check_gradients(
        "relax.nn.batch_norm",
        make_inputs((3, 2, 2), 1),
        symbolic={0: {0: "n", 1: "c"}, **{i: {0: "c"} for i in range(1, 5)}},
        axis=1,
        training=training,
    )


def test_symbolic_batch_at_several_extents():
    """The number of elements is that of the current batch, and not one from compile time."""
    module = build(first_result(axis=1, training=True), (4, 3, 2), 1, batch=tirx.Var("n", "int64"))
    static = build(first_result(axis=1, training=True), (5, 3, 2), 1)
    module = relax.transform.Gradient("main")(module)
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    for batch in (1, 2, 5):
        inputs = make_inputs((batch, 3, 2), 1, "float32")
        results = machine["main_adjoint"](*map(tvm.runtime.tensor, inputs))[1]
        if batch == 5:
            expected = run(relax.transform.Gradient("main")(static), "main_adjoint", inputs)[1]
            for got, wanted in zip(results, expected, strict=True):
                np.testing.assert_allclose(got.numpy(), wanted.numpy(), 1e-5, 1e-5)
        assert all(np.isfinite(got.numpy()).all() for got in results)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("training", [True, False])
def test_half_precision_computes_in_float32(run_rule, dtype, training):
    """4096 elements of mean 8: in half precision their sum and its rounding would swamp the
    result."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    shape = (4096, 2)
    inputs, grads = make_inputs(shape, 1, dtype, mean=8.0), cotangents(shape, 1, dtype)
    results = run_rule(batch_norm, inputs, grads, axis=1, training=training)
    tolerance = 2e-3 if dtype == "float16" else 1e-2
    assert_close(results, reference(inputs, grads, 1, training), tolerance)


def test_large_mean_in_float32(run_rule):
    """A variance computed from the mean of the squares would suffer from cancellation here."""
    inputs = make_inputs((64, 2), 1, "float32", mean=1e4)
    grads = cotangents((64, 2), 1, "float32")
    results = run_rule(batch_norm, inputs, grads, axis=1, training=True)
    assert_close(results, reference(inputs, grads, 1, True), 5e-3)


def test_constant_channel(run_rule):
    """Variance 0: epsilon alone keeps the slope finite."""
    inputs, grads = make_inputs((6, 2), 1), cotangents((6, 2), 1)
    inputs[0][:, 0] = 3.0
    results = run_rule(batch_norm, inputs, grads, axis=1, training=True, epsilon=1e-3)
    assert all(np.isfinite(value).all() for value in results)
    assert_close(results, reference(inputs, grads, 1, True, epsilon=1e-3), 1e-9)


def test_empty_batch_with_running_statistics(run_rule):
    inputs, grads = make_inputs((0, 3), 1), cotangents((0, 3), 1)
    results = run_rule(batch_norm, inputs, grads, axis=1, training=False)
    assert_close(results, reference(inputs, grads, 1, False), 1e-12)


def test_running_statistics_are_constants_of_the_data(run_rule):
    """In inference a sample's gradient does not depend on the rest of its batch."""
    inputs, grads = make_inputs((4, 3), 1), cotangents((4, 3), 1, statistics=False)
    whole = run_rule(batch_norm, inputs, grads, axis=1, training=False)[0]
    alone = run_rule(
        batch_norm,
        [inputs[0][:1], *inputs[1:]],
        [grads[0][:1], *grads[1:]],
        axis=1,
        training=False,
    )[0]
    np.testing.assert_array_equal(whole[:1], alone)


def test_graph_is_small():
    """One operator for the statistics, two sums with the gradient, and one pass for the result."""
    module = relax.transform.Gradient("main")(
        build(lambda bb, *p: relax.TupleGetItem(bb.emit(batch_norm(*p, axis=1, training=True)), 0),
              (4, 3, 2), 1)
    )  # fmt: skip
    called = []
    relax.analysis.post_order_visit(
        module["main_adjoint"],
        lambda e: called.append(e) if isinstance(e, relax.Call) else None,
    )
    full_size = [
        call.op.name.removeprefix("relax.")
        for call in called
        if isinstance(call.ty, relax.TensorType)
        and call.ty.ndim == 3
        and int(call.ty.shape[0]) == 4
    ]
    sums = [c for c in called if c.op.name == "relax.sum" and c.args[0].ty.ndim == 3]
    assert len(sums) == 2  # includes the loss's; gamma's is in a separate operator
    assert sorted(full_size) == ["broadcast_to", "grad.batch_norm_backward_data"]
    assert [call.op.name for call in called if "statistics" in call.op.name] == [
        "relax.grad.batch_norm_statistics"
    ]


def test_decomposed_first_gives_the_same():
    """relax.training applies DecomposeOpsForTraining before Gradient."""
    module = build(first_result(axis=1, training=True, momentum=0.3), (4, 3, 2, 2), 1)
    decomposed = relax.transform.DecomposeOpsForTraining()(module)
    assert "batch_norm" not in decomposed.script()
    inputs = make_inputs((4, 3, 2, 2), 1, "float32")
    results = run(relax.transform.Gradient("main")(module), "main_adjoint", inputs)
    expected = run(relax.transform.Gradient("main")(decomposed), "main_adjoint", inputs)
    np.testing.assert_allclose(results[0].numpy(), expected[0].numpy(), 1e-5)
    for got, wanted in zip(results[1], expected[1], strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), 1e-4, 1e-4)
