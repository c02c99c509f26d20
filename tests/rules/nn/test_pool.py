"""max_pool2d and avg_pool2d against PyTorch and against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from relax_grad import GradientError
from relax_grad.testing import check_against_torch, check_gradients

LAYOUTS = ("NCHW", "NHWC", "HWNC", "CWNH")


@st.composite
def poolings(draw, max_padding=3):
    """Draw the shape of the data, in the order NCHW, and the attributes of a pooling that has windows."""
    attrs = {
        "pool_size": draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        "strides": draw(st.tuples(st.integers(1, 4), st.integers(1, 4))),
        "padding": tuple(draw(st.integers(0, max_padding)) for _ in range(4)),
        "dilation": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "ceil_mode": draw(st.booleans()),
        "layout": draw(st.sampled_from(LAYOUTS)),
    }
    extents = []
    for i in range(2):
        window = (attrs["pool_size"][i] - 1) * attrs["dilation"][i] + 1
        least = max(1, window - attrs["padding"][i] - attrs["padding"][i + 2])
        extents.append(draw(st.integers(least, max(least, 7))))
    return (draw(st.integers(1, 2)), draw(st.integers(1, 2)), *extents), attrs


def store(data, layout):
    return np.ascontiguousarray(data.transpose(["NCHW".index(name) for name in layout]))


def counts(shape, attrs):
    """Return how many windows TVM has along height and width, and where each starts."""
    starts = []
    for i in range(2):
        before, after = attrs["padding"][i], attrs["padding"][i + 2]
        stride = attrs["strides"][i]
        window = (attrs["pool_size"][i] - 1) * attrs["dilation"][i] + 1
        space = shape[i + 2] + before + after - window
        count = (-(-space // stride) if attrs["ceil_mode"] else space // stride) + 1
        if attrs["ceil_mode"] and (count - 1) * stride >= shape[i + 2] + before:
            count -= 1
        starts.append([o * stride - before for o in range(count)])
    return starts


def torch_windows(torch, data, shape, attrs):
    """Return the elements of every window in a last axis, and which of them are not padding."""
    rows, columns = (
        torch.tensor(start)[:, None] + torch.arange(size)[None, :] * dilation
        for start, size, dilation in zip(
            counts(shape, attrs), attrs["pool_size"], attrs["dilation"], strict=True
        )
    )
    inside_rows = (rows >= 0) & (rows < shape[2])
    inside_columns = (columns >= 0) & (columns < shape[3])
    rows, columns = rows.clamp(0, shape[2] - 1), columns.clamp(0, shape[3] - 1)
    taken = data[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    inside = inside_rows[:, None, :, None] & inside_columns[None, :, None, :]
    return torch.where(inside, taken, 0.0).flatten(-2), inside.flatten(-2)


def torch_max_pool2d(torch, data, shape, attrs):
    """PyTorch's kernel on data that is padded in advance, and of its windows those that TVM has."""
    top, left, bottom, right = attrs["padding"]
    data = data.permute([attrs["layout"].index(name) for name in "NCHW"])
    padded = torch.nn.functional.pad(data, (left, right, top, bottom), value=-float("inf"))
    result = torch.nn.functional.max_pool2d(
        padded, attrs["pool_size"], attrs["strides"], 0, attrs["dilation"], attrs["ceil_mode"]
    )
    rows, columns = counts(shape, attrs)
    result = result[:, :, : len(rows), : len(columns)]
    return result.permute(["NCHW".index(name) for name in attrs["layout"]])


def torch_avg_pool2d(torch, data, shape, attrs):
    """The mean over windows that are gathered one by one, for what PyTorch's own does not have."""
    data = data.permute([attrs["layout"].index(name) for name in "NCHW"])
    taken, inside = torch_windows(torch, data, shape, attrs)
    divisor = inside.sum(-1)
    if attrs["count_include_pad"]:
        divisor = 1
        for i, starts in enumerate(counts(shape, attrs)):
            steps = torch.arange(attrs["pool_size"][i]) * attrs["dilation"][i]
            end = shape[i + 2] + attrs["padding"][i + 2]
            counted = (torch.tensor(starts)[:, None] + steps[None, :] < end).sum(-1)
            divisor = divisor * (counted[:, None] if i == 0 else counted[None, :])
    result = taken.sum(-1) / divisor.clamp(min=1)
    return result.permute(["NCHW".index(name) for name in attrs["layout"]])


def has_only_padding(shape, attrs):
    """Tell whether a window has no element of the data; TVM's result is the least finite number."""
    return any(
        not any(0 <= start + k * d < extent for k in range(size))
        for starts, size, d, extent in zip(
            counts(shape, attrs), attrs["pool_size"], attrs["dilation"], shape[2:], strict=True
        )
        for start in starts
    )


def sweep_max_pool2d(torch, case, ties, seed):
    shape, attrs = case
    if has_only_padding(shape, attrs):
        attrs = {**attrs, "padding": (0, 0, 0, 0), "ceil_mode": False}
        shape = shape[:2] + tuple(
            max(e, (k - 1) * d + 1)
            for e, k, d in zip(shape[2:], attrs["pool_size"], attrs["dilation"], strict=True)
        )
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 3, shape).astype("float64") if ties else rng.normal(size=shape)
    check_against_torch(
        "relax.nn.max_pool2d",
        [store(data, attrs["layout"])],
        lambda torch, x: torch_max_pool2d(torch, x, shape, attrs),
        **attrs,
    )


def sweep_avg_pool2d(torch, case, count_include_pad, seed):
    shape, attrs = case
    attrs = {**attrs, "count_include_pad": count_include_pad}
    data = store(np.random.default_rng(seed).normal(size=shape), attrs["layout"])
    check_against_torch(
        "relax.nn.avg_pool2d",
        [data],
        lambda torch, x: torch_avg_pool2d(torch, x, shape, attrs),
        rtol=1e-12,
        **attrs,
    )


def sweep_avg_pool2d_numerically(case, count_include_pad, seed):
    shape, attrs = case
    data = store(np.random.default_rng(seed).normal(size=shape), attrs["layout"])
    check_gradients("relax.nn.avg_pool2d", [data], count_include_pad=count_include_pad, **attrs)


FEW = settings(max_examples=12, deadline=None, derandomize=True)
MANY = settings(max_examples=200, deadline=None, derandomize=True)
CASES = given(case=poolings(), flag=st.booleans(), seed=st.integers(0, 99))


@FEW
@CASES
def test_max_pool2d(torch, case, flag, seed):
    sweep_max_pool2d(torch, case, flag, seed)


@FEW
@CASES
def test_avg_pool2d(torch, case, flag, seed):
    sweep_avg_pool2d(torch, case, flag, seed)


@FEW
@CASES
def test_avg_pool2d_numerically(case, flag, seed):
    sweep_avg_pool2d_numerically(case, flag, seed)


@pytest.mark.slow
@MANY
@CASES
def test_max_pool2d_many(torch, case, flag, seed):
    sweep_max_pool2d(torch, case, flag, seed)


@pytest.mark.slow
@MANY
@CASES
def test_avg_pool2d_many(torch, case, flag, seed):
    sweep_avg_pool2d(torch, case, flag, seed)


@pytest.mark.slow
@MANY
@CASES
def test_avg_pool2d_numerically_many(case, flag, seed):
    sweep_avg_pool2d_numerically(case, flag, seed)


@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("size", "extent"), [(8, 3), (7, 2), (5, 4)])
def test_avg_pool2d_is_torch_s_where_torch_has_it(
    torch, size, extent, ceil_mode, count_include_pad
):
    data = np.random.default_rng(0).normal(size=(1, 2, size, size + 1))
    attrs = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
    check_against_torch(
        "relax.nn.avg_pool2d",
        [data],
        lambda torch, x: torch.nn.functional.avg_pool2d(x, extent, 3, 1, **attrs),
        pool_size=extent,
        strides=3,
        padding=1,
        **attrs,
    )


@pytest.mark.parametrize("special", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
def test_max_pool2d_of_special_values(torch, run_rule, special, share):
    """TVM's forward result is not PyTorch's for these, so that the rule is run alone."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 3, (2, 2, 6, 7)).astype("float64")
    data[rng.random(data.shape) < share] = special
    attrs = {"pool_size": 3, "strides": 2, "padding": 1}
    tensor = torch.from_numpy(data).requires_grad_()
    result = torch.nn.functional.max_pool2d(tensor, 3, 2, 1)
    grad = rng.normal(size=tuple(result.shape))
    (expected,) = torch.autograd.grad(result, tensor, torch.from_numpy(grad))
    (found,) = run_rule(relax.op.nn.max_pool2d, [data], [grad], **attrs)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("builder", [relax.op.nn.max_pool2d, relax.op.nn.avg_pool2d])
def test_out_layout(builder, run_rule):
    """TVM does not compile a pooling whose result is in another layout, but differentiates it."""
    rng = np.random.default_rng(0)
    data, grad = rng.normal(size=(2, 5, 6, 3)), rng.normal(size=(2, 3, 2, 3))
    attrs = {"pool_size": (2, 3), "strides": 2, "padding": (0, 1, 0, 1), "layout": "NHWC"}
    (expected,) = run_rule(builder, [data], [grad.transpose(0, 2, 3, 1).copy()], **attrs)
    (found,) = run_rule(builder, [data], [grad], out_layout="NCHW", **attrs)
    np.testing.assert_array_equal(found, expected)
    assert np.any(found)


@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
def test_refuses_packed_layouts(name):
    x = relax.Var("x", relax.TensorType((1, 2, 6, 6, 4), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            pooled = bb.emit(getattr(relax.op.nn, name)(x, 2, layout="NCHW4c"), "pooled")
            loss = bb.emit_output(relax.op.sum(pooled))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match="must be unpacked") as caught:
        relax.transform.Gradient("main")(bb.get())
    assert f"relax.nn.{name}" in str(caught.value)
    assert "'pooled'" in str(caught.value)
