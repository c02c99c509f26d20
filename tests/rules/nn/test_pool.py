"""Pooling of every rank against PyTorch and against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from relax_grad import GradientError
from relax_grad.testing import check_against_torch, check_gradients

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@st.composite
def poolings(draw, max_padding=3):
    """Draw the shape of the data, channels second, and the attributes of a pooling that has windows."""
    rank = draw(st.sampled_from(list(SPATIAL)))
    most = 2 if rank == 3 else 4

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    attrs = {
        "pool_size": each(1, most),
        "strides": each(1, most),
        "padding": (*each(0, max_padding), *each(0, max_padding)),
        "dilation": each(1, 3),
        "ceil_mode": draw(st.booleans()),
        "layout": "".join(draw(st.permutations("NC" + SPATIAL[rank]))),
    }
    extents = []
    for i in range(rank):
        window = (attrs["pool_size"][i] - 1) * attrs["dilation"][i] + 1
        least = max(1, window - attrs["padding"][i] - attrs["padding"][i + rank])
        extents.append(draw(st.integers(least, max(least, 9 - 2 * rank))))
    return (draw(st.integers(1, 2)), draw(st.integers(1, 2)), *extents), attrs


def plain(attrs):
    return "NC" + SPATIAL[len(attrs["layout"]) - 2]


def store(data, attrs):
    return np.ascontiguousarray(data.transpose([plain(attrs).index(n) for n in attrs["layout"]]))


def counts(shape, attrs):
    """Return for each spatial axis how many windows TVM has, and where each starts."""
    rank = len(shape) - 2
    starts = []
    for i in range(rank):
        before, after = attrs["padding"][i], attrs["padding"][i + rank]
        stride = attrs["strides"][i]
        window = (attrs["pool_size"][i] - 1) * attrs["dilation"][i] + 1
        space = shape[i + 2] + before + after - window
        count = (-(-space // stride) if attrs["ceil_mode"] else space // stride) + 1
        if attrs["ceil_mode"] and (count - 1) * stride >= shape[i + 2] + before:
            count -= 1
        starts.append([o * stride - before for o in range(count)])
    return starts


def taps(torch, shape, attrs):
    """Return for each spatial axis the elements of every window, one window a row."""
    return [
        torch.tensor(start)[:, None] + torch.arange(size)[None, :] * dilation
        for start, size, dilation in zip(
            counts(shape, attrs), attrs["pool_size"], attrs["dilation"], strict=True
        )
    ]


def outer(torch, axes, combine):
    """Combine one matrix for each spatial axis: all rows of all axes first, then all columns."""
    rank = len(axes)
    result = None
    for i, axis in enumerate(axes):
        shape = [1] * 2 * rank
        shape[i], shape[rank + i] = axis.shape
        term = axis.reshape(shape)
        result = term if result is None else combine(result, term)
    return result


def torch_windows(torch, data, shape, attrs):
    """Return the elements of every window in a last axis, and which of them are not padding."""
    rank = len(shape) - 2
    elements = taps(torch, shape, attrs)
    pairs = list(zip(elements, shape[2:], strict=True))
    inside = outer(torch, [(e >= 0) & (e < extent) for e, extent in pairs], torch.logical_and)
    index = []
    for i, (element, extent) in enumerate(pairs):
        to = [1] * 2 * rank
        to[i], to[rank + i] = element.shape
        index.append(element.clamp(0, extent - 1).reshape(to))
    taken = torch.where(inside, data[(slice(None), slice(None), *index)], 0.0)
    return taken.flatten(2 + rank), inside.flatten(rank)


def torch_max_pool(torch, data, shape, attrs):
    """PyTorch's kernel on data that is padded in advance, and of its windows those that TVM has."""
    rank = len(shape) - 2
    padding = attrs["padding"]
    data = data.permute([attrs["layout"].index(name) for name in plain(attrs)])
    pads = [padding[axis + end] for axis in reversed(range(rank)) for end in (0, rank)]
    padded = torch.nn.functional.pad(data, pads, value=-float("inf"))
    pool = getattr(torch.nn.functional, f"max_pool{rank}d")
    result = pool(
        padded, attrs["pool_size"], attrs["strides"], 0, attrs["dilation"], attrs["ceil_mode"]
    )
    windows = (slice(len(starts)) for starts in counts(shape, attrs))
    result = result[(slice(None), slice(None), *windows)]
    return result.permute([plain(attrs).index(name) for name in attrs["layout"]])


def torch_avg_pool(torch, data, shape, attrs):
    """The mean over windows that are gathered one by one, for what PyTorch's own does not have."""
    rank = len(shape) - 2
    data = data.permute([attrs["layout"].index(name) for name in plain(attrs)])
    taken, inside = torch_windows(torch, data, shape, attrs)
    divisor = inside.sum(-1)
    if attrs["count_include_pad"]:
        ends = [
            extent + after for extent, after in zip(shape[2:], attrs["padding"][rank:], strict=True)
        ]
        counted = [e < end for e, end in zip(taps(torch, shape, attrs), ends, strict=True)]
        divisor = outer(torch, counted, torch.logical_and).flatten(rank).sum(-1)
    result = taken.sum(-1) / divisor.clamp(min=1)
    return result.permute([plain(attrs).index(name) for name in attrs["layout"]])


def has_only_padding(shape, attrs):
    """Tell whether a window has no element of the data; TVM's result is the least finite number."""
    return any(
        not any(0 <= start + k * d < extent for k in range(size))
        for starts, size, d, extent in zip(
            counts(shape, attrs), attrs["pool_size"], attrs["dilation"], shape[2:], strict=True
        )
        for start in starts
    )


def sweep_max_pool(torch, case, ties, seed):
    shape, attrs = case
    rank = len(shape) - 2
    if has_only_padding(shape, attrs):
        attrs = {**attrs, "padding": (0,) * 2 * rank, "ceil_mode": False}
        shape = shape[:2] + tuple(
            max(e, (k - 1) * d + 1)
            for e, k, d in zip(shape[2:], attrs["pool_size"], attrs["dilation"], strict=True)
        )
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 3, shape).astype("float64") if ties else rng.normal(size=shape)
    check_against_torch(
        f"relax.nn.max_pool{rank}d",
        [store(data, attrs)],
        lambda torch, x: torch_max_pool(torch, x, shape, attrs),
        **attrs,
    )


def sweep_avg_pool(torch, case, count_include_pad, seed):
    shape, attrs = case
    attrs = {**attrs, "count_include_pad": count_include_pad}
    data = store(np.random.default_rng(seed).normal(size=shape), attrs)
    check_against_torch(
        f"relax.nn.avg_pool{len(shape) - 2}d",
        [data],
        lambda torch, x: torch_avg_pool(torch, x, shape, attrs),
        rtol=1e-12,
        **attrs,
    )


def sweep_avg_pool_numerically(case, count_include_pad, seed):
    shape, attrs = case
    data = store(np.random.default_rng(seed).normal(size=shape), attrs)
    operator = f"relax.nn.avg_pool{len(shape) - 2}d"
    check_gradients(operator, [data], count_include_pad=count_include_pad, **attrs)


def sweep_adaptive_avg_pool(torch, extents, windows, seed):
    """Any number of windows over any number of elements."""
    rank = len(extents)
    check_against_torch(
        f"relax.nn.adaptive_avg_pool{rank}d",
        [np.random.default_rng(seed).normal(size=(2, 1, *extents))],
        lambda torch, x: getattr(torch.nn.functional, f"adaptive_avg_pool{rank}d")(x, windows),
        rtol=1e-12,
        output_size=windows,
    )


FEW = settings(max_examples=12, deadline=None, derandomize=True)
MANY = settings(max_examples=200, deadline=None, derandomize=True)
ADAPTIVE = given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
CASES = given(case=poolings(), flag=st.booleans(), seed=st.integers(0, 99))


@FEW
@CASES
def test_max_pool(torch, case, flag, seed):
    sweep_max_pool(torch, case, flag, seed)


@FEW
@CASES
def test_avg_pool(torch, case, flag, seed):
    sweep_avg_pool(torch, case, flag, seed)


@FEW
@CASES
def test_avg_pool_numerically(case, flag, seed):
    sweep_avg_pool_numerically(case, flag, seed)


@pytest.mark.slow
@MANY
@CASES
def test_max_pool_many(torch, case, flag, seed):
    sweep_max_pool(torch, case, flag, seed)


@pytest.mark.slow
@MANY
@CASES
def test_avg_pool_many(torch, case, flag, seed):
    sweep_avg_pool(torch, case, flag, seed)


@pytest.mark.slow
@MANY
@CASES
def test_avg_pool_numerically_many(case, flag, seed):
    sweep_avg_pool_numerically(case, flag, seed)


@FEW
@ADAPTIVE
def test_adaptive_avg_pool(torch, sizes, seed):
    sweep_adaptive_avg_pool(torch, *zip(*sizes, strict=True), seed)


@pytest.mark.slow
@MANY
@ADAPTIVE
def test_adaptive_avg_pool_many(torch, sizes, seed):
    sweep_adaptive_avg_pool(torch, *zip(*sizes, strict=True), seed)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pooling_emits_one_operator(rank):
    """Also where a dimension is symbolic."""
    for kind, attrs in (("max", {"pool_size": 2}), ("avg", {"pool_size": 2}), ("adaptive_avg", {})):
        x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 2, *(4,) * rank), "float16"))
        bb = relax.BlockBuilder()
        with bb.function("main", [x]):
            with bb.dataflow():
                pooled = bb.emit(getattr(relax.op.nn, f"{kind}_pool{rank}d")(x, **attrs))
                call = bb.lookup_binding(pooled)
                grad = bb.emit(relax.op.ones_like(pooled))
                (partial,) = call.op.get_attr("FPrimalGradient")(pooled, call, grad, bb)
                out = bb.emit_output(partial)
            bb.emit_func_output(out)
        assert partial.op.name == f"relax.grad.{kind}_pool{rank}d_backward"
        assert list(partial.args) == [grad, x]


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


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("special", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
def test_max_pool_of_special_values(torch, run_rule, rank, special, share):
    """TVM's forward result is not PyTorch's for these, so that the rule is run alone."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 3, (2, 2, 6, 7, 3)[: rank + 2]).astype("float64")
    data[rng.random(data.shape) < share] = special
    attrs = {"pool_size": 3, "strides": 2, "padding": 1}
    tensor = torch.from_numpy(data).requires_grad_()
    result = getattr(torch.nn.functional, f"max_pool{rank}d")(tensor, 3, 2, 1)
    grad = rng.normal(size=tuple(result.shape))
    (expected,) = torch.autograd.grad(result, tensor, torch.from_numpy(grad))
    (found,) = run_rule(getattr(relax.op.nn, f"max_pool{rank}d"), [data], [grad], **attrs)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "avg", "adaptive_avg"])
def test_out_layout(kind, rank, run_rule):
    builder = getattr(relax.op.nn, f"{kind}_pool{rank}d")
    rng = np.random.default_rng(0)
    data, grad = rng.normal(size=(2, *(5, 6, 3)[:rank], 3)), rng.normal(size=(2, 3, *(2,) * rank))
    attrs = {"output_size": 2}
    if kind != "adaptive_avg":
        attrs = {"pool_size": (2, 3, 2)[:rank], "strides": (2, 2, 1)[:rank]}
    attrs["layout"] = f"N{SPATIAL[rank]}C"
    last = np.ascontiguousarray(np.moveaxis(grad, 1, -1))
    (expected,) = run_rule(builder, [data], [last], **attrs)
    (found,) = run_rule(builder, [data], [grad], out_layout=f"NC{SPATIAL[rank]}", **attrs)
    np.testing.assert_array_equal(found, expected)
    assert np.any(found)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "avg", "adaptive_avg"])
def test_refuses_packed_layouts(kind, rank):
    name, layout = f"{kind}_pool{rank}d", f"NC{SPATIAL[rank]}4c"
    x = relax.Var("x", relax.TensorType((1, 2, *(6,) * rank, 4), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            pooled = bb.emit(getattr(relax.op.nn, name)(x, 2, layout=layout), "pooled")
            loss = bb.emit_output(relax.op.sum(pooled))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match="must be unpacked") as caught:
        relax.transform.Gradient("main")(bb.get())
    assert f"relax.nn.{name}" in str(caught.value)
    assert "'pooled'" in str(caught.value)
