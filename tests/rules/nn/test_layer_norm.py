"""Gradients of layer_norm, rms_norm, group_norm and instance_norm."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax, tirx

from relax_grad.errors import GradientError
from relax_grad.op.norm_statistics import group_norm_statistics
from relax_grad.testing import TorchCase, check_gradients, check_many_against_torch

nn = relax.op.nn


def torch_normalize(torch, x, axes, groups, channel, parameters, parameter_axes, attrs):
    """Compute the definition in float64, one step at a time. ``groups`` is None for operators
    without groups."""
    shape = x.shape
    if groups is not None:
        x = x.unflatten(channel, (groups, -1))
        axes = [axis + (axis > channel) for axis in axes] + [channel + 1]
    mean = x.mean(axes, keepdim=True) if attrs.get("center") is not None else 0.0
    y = (x - mean) / ((x - mean).square().mean(axes, keepdim=True) + attrs["epsilon"]).sqrt()
    y = y.reshape(shape)
    order = sorted(range(len(parameter_axes)), key=parameter_axes.__getitem__)
    extents = [shape[axis] if axis in parameter_axes else 1 for axis in range(len(shape))]
    gamma, *beta = (parameter.permute(order).reshape(extents) for parameter in parameters)
    y = y * gamma if attrs.get("scale", True) else y
    return y + beta[0] if beta and attrs["center"] else y


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    ndim = len(shape)
    name = draw(st.sampled_from(["layer_norm", "rms_norm", "group_norm", "instance_norm"]))
    some = st.permutations(range(ndim)).flatmap(
        lambda order: st.integers(1, ndim).map(lambda count: order[:count])
    )
    axes = draw(some)
    attrs = {"epsilon": draw(st.sampled_from([1e-5, 0.1]))}
    if name != "rms_norm":
        attrs |= {"center": draw(st.booleans()), "scale": draw(st.booleans())}
    groups, channel = None, axes[0]
    if name in ("group_norm", "instance_norm"):
        axes = axes[1:]
        divisors = [d for d in range(1, shape[channel] + 1) if shape[channel] % d == 0]
        groups = draw(st.sampled_from(divisors)) if name == "group_norm" else shape[channel]
    signs = [draw(st.sampled_from([0, ndim])) for _ in range(ndim)]
    return name, shape, axes, groups, channel, signs, attrs


def torch_case(case):
    name, shape, axes, groups, channel, signs, attrs = case
    rng = np.random.default_rng(0)
    parameter_axes = axes if groups is None else [channel]
    extents = [shape[axis] for axis in parameter_axes]
    parameters = [rng.normal(size=extents) for _ in range(1 if name == "rms_norm" else 2)]
    given_attrs = {"axes": [axis - signs[axis] for axis in axes], **attrs}
    if groups is not None:
        given_attrs["channel_axis"] = channel - signs[channel]
    if name == "group_norm":
        given_attrs["num_groups"] = groups
    return TorchCase(
        f"relax.nn.{name}",
        [rng.normal(0.5, 1.0, shape), *parameters],
        lambda torch, x, *parameters: torch_normalize(
            torch, x, list(axes), groups, channel, parameters, parameter_axes, attrs
        ),
        given_attrs,
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape_and_axes(torch, case):
    check_many_against_torch([torch_case(case)])


@pytest.mark.slow
@at_length(1000)
@given(batch=batches(cases()))
def test_any_shape_and_axes_at_length(torch, batch):
    check_many_against_torch([torch_case(case) for case in batch], target=TARGET)


ROWS, COLUMNS = 3, 4096
OPERATORS = {
    "layer_norm": (nn.layer_norm, (ROWS, COLUMNS), (COLUMNS,), {"axes": [1]}),
    "rms_norm": (nn.rms_norm, (ROWS, COLUMNS), (COLUMNS,), {"axes": [1]}),
    "group_norm": (
        nn.group_norm,
        (ROWS, 4, COLUMNS),
        (4,),
        {"num_groups": 2, "channel_axis": 1, "axes": [2]},
    ),
    "instance_norm": (
        nn.instance_norm,
        (ROWS, 4, COLUMNS),
        (4,),
        {"channel_axis": 1, "axes": [2]},
    ),
}


def rule_and_reference(run_rule, torch, name, dtype, mean):
    """Return the partials of the rule in ``dtype``, and those of the same numbers in float64."""
    operator, shape, extents, attrs = OPERATORS[name]
    rng = np.random.default_rng(0)
    inputs = [rng.normal(mean, 1.0, shape), rng.normal(size=extents), rng.normal(size=extents)]
    inputs = [value.astype(dtype) for value in inputs[: 2 if name == "rms_norm" else 3]]
    # In float32, a cotangent with a mean would expose the rounding of the mean of the data.
    cotangent = rng.normal(1.0 if dtype == "float16" else 0.0, 1.0, shape).astype(dtype)
    grads = run_rule(operator, inputs, [cotangent], **attrs)
    leaves = [torch.tensor(value.astype("float64"), requires_grad=True) for value in inputs]
    grouped = "norm" in name and len(shape) == 3
    y = torch_normalize(
        torch,
        leaves[0],
        attrs["axes"],
        attrs.get("num_groups", 4) if grouped else None,
        1,
        leaves[1:],
        [1],
        {"epsilon": 1e-5, **({} if name == "rms_norm" else {"center": True})},
    )
    y.backward(torch.tensor(cotangent.astype("float64")))
    return grads, [leaf.grad.numpy() for leaf in leaves]


@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"), [("float16", 8.0, 2e-3), ("float32", 1e3, 5e-3)]
)
@pytest.mark.parametrize("name", OPERATORS)
def test_many_elements_with_a_large_mean(run_rule, torch, name, dtype, mean, tolerance):
    """Sums in half precision would stop growing, and a mean of squares would cancel."""
    grads, expected = rule_and_reference(run_rule, torch, name, dtype, mean)
    for got, wanted in zip(grads, expected, strict=True):
        np.testing.assert_allclose(got, wanted, tolerance, tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("name", OPERATORS)
def test_graph_is_small(name):
    """The gradient takes the minimal number of passes over the data."""
    operator, shape, extents, attrs = OPERATORS[name]
    params = [relax.Var("x", relax.TensorType(shape, "float32"))]
    params += [relax.Var("p", relax.TensorType(extents, "float32"))] * (1 + (name != "rms_norm"))
    bb, calls = relax.BlockBuilder(), []
    grad = relax.Var("g", relax.TensorType(shape, "float32"))
    with bb.function("main", [*dict.fromkeys(params), grad]):
        with bb.dataflow():
            result = bb.emit(operator(*params, **attrs))
            call = bb.lookup_binding(result)
            partials = call.op.get_attr("FPrimalGradient")(result, call, grad, bb)
            partials = bb.emit_output(relax.Tuple(partials))
        bb.emit_func_output(partials)
    module = relax.transform.DeadCodeElimination()(bb.get())
    relax.analysis.post_order_visit(
        module["main"], lambda e: calls.append(e) if isinstance(e, relax.Call) else None
    )
    large = np.prod(shape)

    def is_large(expr):
        kind = expr.ty
        is_tensor = isinstance(kind, relax.TensorType)
        return is_tensor and np.prod([int(extent) for extent in kind.shape]) == large

    written = [call for call in calls if is_large(call)]
    reduced = [call for call in calls if not is_large(call) and is_large(call.args[0])]
    # The result; the statistics, gamma and beta.
    assert (len(written), len(reduced)) == ((1, 2) if name == "rms_norm" else (1, 3))


def test_symbolic_groups_to_second_order():
    """The test uses TVM's pass. The sums over groups have no reshape, which that pass cannot
    handle."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(2, 6, 3)), rng.normal(size=6), rng.normal(size=6)]
    attrs = {"num_groups": 3, "channel_axis": 1, "axes": [2]}
    names = {0: {0: "n", 2: "w"}}
    check_gradients("relax.nn.group_norm", inputs, order=2, symbolic=names, through="tvm", **attrs)


@pytest.mark.parametrize("is_statistics", [False, True])
def test_symbolic_channels_cannot_be_grouped(is_statistics):
    c = tirx.Var("c", "int64")
    shapes = [(2, c, 3), (c,), (c,)]
    params = [relax.Var(f"x{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    attrs = {"num_groups": 2, "channel_axis": 1, "axes": [2]}
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            if is_statistics:
                y = bb.emit(group_norm_statistics(params[0], **attrs))
                y = bb.emit(relax.TupleGetItem(y, 1))
            else:
                y = bb.emit(nn.group_norm(*params, **attrs))
            loss = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match="number of channels must be a constant"):
        relax.transform.Gradient("main", params[:1])(bb.get())


@pytest.mark.parametrize("shape", [(2, 4, 0), (2, 0, 3), (0, 4, 3)])
@pytest.mark.parametrize("axes", [[], [2], [0, 2]])
def test_groups_of_data_without_elements(run_rule, shape, axes):
    """The gradients of gamma and beta are sums of nothing."""
    channels = shape[1]
    inputs = [np.ones(shape), np.ones(channels), np.ones(channels)]
    attrs = {"num_groups": 2, "channel_axis": 1, "axes": axes}
    grads = run_rule(nn.group_norm, inputs, [np.ones(shape)], **attrs)
    for got, taken in zip(grads, inputs, strict=True):
        np.testing.assert_array_equal(got, np.zeros(taken.shape))


def test_a_symbolic_count_takes_no_pass_over_the_data():
    """batch_norm divides by a count that is computed from the shape."""
    n, m = (tirx.Var(name, "int64") for name in "nm")
    params = [relax.Var("x", relax.TensorType([n, 3, m], "float32"))]
    params += [relax.Var(f"p{i}", relax.TensorType([3], "float32")) for i in range(4)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            y = relax.TupleGetItem(bb.emit(nn.batch_norm(*params, axis=1)), 0)
            loss = bb.emit_output(relax.op.sum(bb.emit(y)))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", params[:3])(bb.get())
    del module["main"]
    script = relax.transform.LegalizeOps()(module).script()
    assert "backward_data" in script
    assert "ones_like" not in script


def test_large_symbolic_count():
    """float32 holds 2**24 and not 2**24 + 1: a count must not be a sum of ones."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n, 1], "int8"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        share = relax.op.grad.divide_by_count(relax.const(1.0), relax.op.shape_of(x))
        bb.emit_func_output(bb.emit(share))
    machine = relax.VirtualMachine(tvm.compile(bb.get(), TARGET), tvm.cpu())
    count = 2**24 + 2**10
    mean = machine["main"](tvm.runtime.tensor(np.zeros((count, 1), "int8"))).numpy()
    assert mean == np.float32(1) / np.float32(count)


def test_empty_symbolic_batch():
    """The gradient of gamma and beta, a sum over no elements, is 0."""
    n = tirx.Var("n", "int64")
    params = [relax.Var("x", relax.TensorType([n, 3], "float32"))]
    params += [relax.Var(name, relax.TensorType([3], "float32")) for name in ("gamma", "beta")]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            y = bb.emit(nn.layer_norm(*params, axes=[1]))
            loss = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main")(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    values = [np.zeros((0, 3), "float32"), *np.ones((2, 3), "float32")]
    for grad in machine["main_adjoint"](*map(tvm.runtime.tensor, values))[1]:
        assert not grad.numpy().any()
