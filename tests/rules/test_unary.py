"""Gradients of element-wise functions: half precision, large and special arguments, random
values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import TARGET, at_length, batches
from tvm import relax

from relax_grad.testing import TorchCase, check_many_against_torch

EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}

#: Points of each function. Some make a formula in half precision overflow or cancel.
POINTS = {
    "abs": [-2, 0, 3],
    "acos": [-0.99, -0.4, 0, 0.3, 0.999],
    "acosh": [1.002, 1.5, 40, 3e4],
    "asin": [-0.99, -0.4, 0, 0.3, 0.999],
    "asinh": [-3e4, -2, 0, 0.01, 300],
    "atan": [-300, -2, 0, 0.01, 300],
    "atanh": [-0.99, -0.4, 0, 0.3, 0.999],
    "cosh": [-9, -0.01, 0, 3],
    "erf": [-3e4, -2, 0, 0.01, 2.5],
    "rsqrt": [1e-3, 0.3, 2, 3e4],
    "sinh": [-9, -0.01, 0, 3],
    "square": [-3e4, -0.01, 0, 2],
    "tan": [-1.5, -0.01, 0, 1.2],
}


def gradient(op, x, dtype, *args):
    """Return the gradient of ``sum(op(x))``, computed in a dtype that represents ``x`` exactly."""
    param = relax.Var("x", relax.TensorType(x.shape, "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [param]):
        with bb.dataflow():
            narrow = bb.emit(relax.op.astype(param, dtype))
            result = bb.emit(op(narrow, *args))
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.astype(result, "float32"))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", [param])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    return machine["main_adjoint"](tvm.runtime.tensor(x.astype("float32")))[1][0].numpy()


def rounded(values, dtype):
    """Return values rounded to a dtype, in float64."""
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.array(values, "float64").astype(dtype).astype("float64")


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("op", POINTS)
def test_accuracy(torch, op, dtype):
    x = rounded(POINTS[op], dtype)
    if op in ("acos", "asin", "atanh"):
        x = x[np.abs(x) < 1]
    if op == "acosh":
        x = x[x > 1]
    leaf = torch.tensor(x, requires_grad=True)
    getattr(torch, op)(leaf).sum().backward()
    expected = leaf.grad.numpy()
    slope = gradient(getattr(relax.op, op), x, dtype)
    # Half precision rounds the forward result and the gradient, each once.
    tiny = 1e-7 if dtype == "float16" else 1e-30
    np.testing.assert_allclose(slope, expected, rtol=8 * EPSILON[dtype], atol=tiny)


@pytest.mark.parametrize(
    ("op", "points"),
    [
        ("abs", [0.0, -0.0, np.nan, np.inf]),
        ("acos", [1.0, -1.0, 1.5, np.nan]),
        ("acosh", [1.0, 0.5, -2.0, np.inf, np.nan]),
        ("asin", [1.0, -1.0, 1.5, np.nan]),
        ("atanh", [1.0, -1.0, 2.0, np.inf]),
        ("erf", [np.inf, -np.inf, np.nan]),
        ("log", [0.0, np.inf]),
        ("rsqrt", [0.0, -0.0, np.inf, -1.0, np.nan]),
        ("sqrt", [0.0, np.inf, -1.0, np.nan]),
    ],
)
def test_edges_of_the_domain_are_those_of_torch(torch, op, points):
    leaf = torch.tensor(points, dtype=torch.float32, requires_grad=True)
    getattr(torch, op)(leaf).sum().backward()
    slope = gradient(getattr(relax.op, op), np.array(points), "float32")
    np.testing.assert_allclose(slope, leaf.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_clip_at_its_special_points(dtype):
    x = np.array([-2, -1, -0.5, 0.5, 1, 2, np.inf, -np.inf, np.nan])
    slope = gradient(relax.op.clip, x, dtype, -1, 0.5)
    assert slope.tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0]


def test_clip_by_bounds_that_its_dtype_rounds():
    """In float16, the bound 0.1 is 0.0999756. The element equals it, so it is on the bound."""
    x = rounded([0.1, 0.2], "float16")
    assert gradient(relax.op.clip, x, "float16", 0.0, 0.1).tolist() == [1, 0]


@pytest.mark.parametrize(("low", "high"), [(1, 0), (0.5, -0.5)])
def test_clip_by_bounds_that_are_crossed(low, high):
    """The result is the lower bound for every element, also for an element on the bound."""
    x = np.array([-1, -0.5, 0, 0.5, 0.75, 1, 2, np.nan])
    assert gradient(relax.op.clip, x, "float32", low, high).tolist() == [0] * 8


def test_integers_have_no_gradient():
    x = relax.Var("x", relax.TensorType((3,), "int32"))
    for name, args in (("abs", ()), ("square", ()), ("clip", (0, 1))):
        bb = relax.BlockBuilder()
        with bb.function("main", [x]):
            result = bb.emit(getattr(relax.op, name)(x, *args))
            call = bb.lookup_binding(result)
            partials = call.op.get_attr("FPrimalGradient")(result, call, result, bb)
            bb.emit_func_output(result)
        assert [partial.op.name for partial in partials] == ["relax.grad.no_grad"] * len(call.args)


INTERVALS = {
    **dict.fromkeys(["acos", "asin", "atanh"], (-0.999, 0.999)),
    **dict.fromkeys(["abs", "asinh", "atan", "erf", "square"], (-1e6, 1e6)),
    **dict.fromkeys(["cosh", "sinh", "tan"], (-10, 10)),
    "acosh": (1.001, 1e6),
    "rsqrt": (1e-3, 1e6),
}


@st.composite
def cases(draw):
    op = draw(st.sampled_from(sorted(INTERVALS)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = draw(
        st.lists(
            st.floats(*INTERVALS[op]), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))
        )
    )
    return op, np.array(values).reshape(shape)


def torch_case(case):
    op, x = case
    return TorchCase(f"relax.{op}", [x], lambda torch, x: getattr(torch, op)(x))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=cases())
def test_random_values(torch, case):
    check_many_against_torch([torch_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(cases()))
def test_random_values_at_length(torch, batch):
    check_many_against_torch(list(map(torch_case, batch)), target=TARGET)


@st.composite
def clips(draw):
    bounds = st.floats(-3, 3) | st.sampled_from([-np.inf, np.inf]) | st.integers(-3, 3)
    low, high = sorted([draw(bounds), draw(bounds)])
    numbers = st.floats(-4, 4) | st.sampled_from([float(low), float(high)])
    return np.array(draw(st.lists(numbers, min_size=1, max_size=6))), low, high


def clip_case(case):
    x, low, high = case
    return TorchCase("relax.clip", [x, low, high], lambda torch, x: x.clamp(low, high))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=clips())
def test_clip_random(torch, case):
    check_many_against_torch([clip_case(case)])


@pytest.mark.slow
@at_length(200)
@given(batches(clips()))
def test_clip_random_at_length(torch, batch):
    check_many_against_torch(list(map(clip_case, batch)), target=TARGET)
