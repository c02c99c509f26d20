"""Pooling of every rank against PyTorch and against finite differences."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import in_layout, layouts, parts_of, places
from sweep import TARGET, at_length, batches
from tvm import relax, tirx

from relax_grad import GradientError
from relax_grad.testing import (
    TorchCase,
    check_against_torch,
    check_gradients,
    check_many_against_torch,
)

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


@dataclass(frozen=True)
class Pooling:
    """A pooling of random data. In every layout, ``shape`` has the axes N, C, D, H, W in this
    order."""

    kind: str
    shape: tuple[int, ...]
    attrs: dict
    values: str = "normal"
    backward: bool = False
    seed: int = 0

    @property
    def plain(self) -> str:
        return f"NC{'DHW'[5 - len(self.shape) :]}"

    @property
    def name(self) -> str:
        return f"{self.kind}_pool{len(self.shape) - 2}d"

    def data(self) -> np.ndarray:
        """Draw the data, in its layout."""
        rng = np.random.default_rng(self.seed)
        data = {
            "normal": lambda: rng.normal(size=self.shape),
            "ties": lambda: rng.integers(0, 3, self.shape).astype("float64"),
            "special": lambda: rng.choice([0.0, 1.0, np.nan, -np.inf, np.inf], self.shape),
        }[self.values]()
        return in_layout(data, self.plain, self.attrs["layout"])

    def torch(self, torch, data):
        """Compute the same in PyTorch, in a differentiable way."""
        layout, out_layout = self.attrs["layout"], self.attrs["out_layout"] or self.attrs["layout"]
        at = torch.from_numpy(places(self.shape, self.plain, layout).ravel())
        data = data.flatten()[torch.argsort(at)].reshape(self.shape)
        pool = {
            "max": torch_max_pool,
            "avg": torch_avg_pool,
            "adaptive_avg": torch_adaptive_avg_pool,
        }
        result = pool[self.kind](torch, data, self.shape, self.attrs)
        at = torch.from_numpy(places(result.shape, self.plain, out_layout))
        return torch.where(at >= 0, result.flatten()[at], 0.0)

    def torch_backward(self, torch, grad, data):
        leaf = data.detach().requires_grad_()
        return torch.autograd.grad(self.torch(torch, leaf), leaf, grad, create_graph=True)[0]

    def case(self, torch) -> TorchCase:
        """Return the pooling and its gradient, or its backward operator and the gradient of
        that."""
        data = self.data()
        if not self.backward:
            return TorchCase(f"relax.nn.{self.name}", [data], self.torch, self.attrs)
        shape = self.torch(torch, torch.from_numpy(data)).shape
        grad = np.random.default_rng(self.seed + 1).normal(size=tuple(shape))
        name = f"relax.grad.{self.name}_backward"
        return TorchCase(name, [grad, data], self.torch_backward, self.attrs, wrt=[0])


@st.composite
def poolings(draw, kinds=("max", "avg", "adaptive_avg")):
    """Draw a pooling that has windows, of any kind, rank, layouts and attributes."""
    kind, rank = draw(st.sampled_from(kinds)), draw(st.sampled_from(list(SPATIAL)))
    plain = f"NC{SPATIAL[rank]}"
    most = 2 if rank == 3 else 4

    def per_axis(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    layout = draw(layouts(plain))
    attrs = {"layout": layout, "out_layout": draw(st.none() | layouts(plain))}
    if kind == "adaptive_avg":
        attrs["output_size"] = draw(st.none() | st.just(per_axis(1, 6)))
        extents = per_axis(1, 6)
    else:
        attrs["pool_size"], attrs["strides"] = per_axis(1, most), per_axis(1, most)
        attrs["padding"] = (*per_axis(0, 3), *per_axis(0, 3))
        attrs["dilation"] = per_axis(1, 3)
        attrs["ceil_mode"] = draw(st.booleans())
        attrs["count_include_pad"] = draw(st.booleans())
        extents = []
        for i in range(rank):
            window = (attrs["pool_size"][i] - 1) * attrs["dilation"][i] + 1
            least = max(1, window - attrs["padding"][i] - attrs["padding"][i + rank])
            extents.append(draw(st.integers(least, max(least, 9 - 2 * rank))))
    parts = parts_of(layout)
    batch = (draw(st.integers(1, 2)) * parts.get(name, 1) for name in "NC")
    pooling = Pooling(kind, (*batch, *extents), attrs, seed=draw(st.integers(0, 99)))
    if kind != "max":
        return replace(pooling, backward=draw(st.booleans()))
    values = draw(st.sampled_from(["normal", "ties", "special"]))
    # For special values and for windows without elements, TVM's max pooling differs from PyTorch's.
    backward = values == "special" or has_only_padding(pooling.shape, attrs) or draw(st.booleans())
    return replace(pooling, values=values, backward=backward)


def counts(shape, attrs):
    """Return for each spatial axis the starts of TVM's windows."""
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
    """Return the elements of every window in a last axis, and a mask of those that are not
    padding."""
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
    """Apply PyTorch's kernel to data that is padded in advance, and return only the windows that
    TVM has."""
    if not data.isfinite().all():
        return torch_max_pool_of_special_values(torch, data, shape, attrs)
    rank, padding = len(shape) - 2, attrs["padding"]
    pads = [padding[axis + end] for axis in reversed(range(rank)) for end in (0, rank)]
    padded = torch.nn.functional.pad(data, pads, value=-torch.inf)
    pool = getattr(torch.nn.functional, f"max_pool{rank}d")
    result = pool(
        padded, attrs["pool_size"], attrs["strides"], 0, attrs["dilation"], attrs["ceil_mode"]
    )
    windows = (slice(len(starts)) for starts in counts(shape, attrs))
    return result[(slice(None), slice(None), *windows)]


def torch_max_pool_of_special_values(torch, data, shape, attrs):
    """Choose as PyTorch's kernel does: the last NaN, else the first of equal elements, and no
    padding."""
    taken, inside = torch_windows(torch, data, shape, attrs)
    position = torch.arange(taken.shape[-1])
    # The elements equal to the largest number rank before the others, and NaN ranks before both.
    largest = taken.detach().masked_fill(~inside | taken.isnan(), -torch.inf).amax(-1, keepdim=True)
    rank = torch.where(taken.detach() == largest, len(position) - position, 0)
    rank = torch.where(taken.isnan(), len(position) + 1 + position, rank)
    rank = torch.where(inside, rank, -1)
    winner = taken.gather(-1, rank.argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where((rank >= 0).any(-1), winner, -torch.inf)


def torch_avg_pool(torch, data, shape, attrs):
    """Return the mean over windows that are gathered one by one, for cases that PyTorch's own does
    not have."""
    rank = len(shape) - 2
    taken, inside = torch_windows(torch, data, shape, attrs)
    divisor = inside.sum(-1)
    if attrs["count_include_pad"]:
        ends = [
            extent + after for extent, after in zip(shape[2:], attrs["padding"][rank:], strict=True)
        ]
        counted = [e < end for e, end in zip(taps(torch, shape, attrs), ends, strict=True)]
        divisor = outer(torch, counted, torch.logical_and).flatten(rank).sum(-1)
    return taken.sum(-1) / divisor.clamp(min=1)


def torch_adaptive_avg_pool(torch, data, shape, attrs):
    """Apply PyTorch's own pooling."""
    pool = getattr(torch.nn.functional, f"adaptive_avg_pool{len(shape) - 2}d")
    return pool(data, attrs["output_size"] or shape[2:])


def has_only_padding(shape, attrs):
    """Tell whether a window has no element of the data. TVM's result for it is the least finite
    number."""
    return any(
        not any(0 <= start + k * d < extent for k in range(size))
        for starts, size, d, extent in zip(
            counts(shape, attrs), attrs["pool_size"], attrs["dilation"], shape[2:], strict=True
        )
        for start in starts
    )


@at_length(50, derandomize=True)
@given(batches(poolings()))
def test_same_as_torch(torch, batch):
    check_many_against_torch([pooling.case(torch) for pooling in batch], target=TARGET)


@pytest.mark.slow
@at_length(2000)
@given(batches(poolings()))
def test_same_as_torch_at_length(torch, batch):
    check_many_against_torch([pooling.case(torch) for pooling in batch], target=TARGET)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(poolings(kinds=("avg",)))
def test_avg_pool_numerically(pooling):
    check_gradients(f"relax.nn.{pooling.name}", [pooling.data()], **pooling.attrs)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pooling_emits_one_operator(rank):
    """The data has a symbolic dimension."""
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
def test_max_pool_of_special_values(torch, run_rule, rank):
    """TVM's forward result differs from PyTorch's for these values, so the rule runs alone. A batch
    has them all."""
    rng = np.random.default_rng(0)
    parts = []
    for special, share in itertools.product([np.nan, -np.inf, np.inf], [0.2, 0.6, 1.0]):
        part = rng.integers(0, 3, (2, 2, 6, 7, 3)[: rank + 2]).astype("float64")
        part[rng.random(part.shape) < share] = special
        parts.append(part)
    data = np.concatenate(parts)
    attrs = {"pool_size": 3, "strides": 2, "padding": 1}
    tensor = torch.from_numpy(data).requires_grad_()
    result = getattr(torch.nn.functional, f"max_pool{rank}d")(tensor, 3, 2, 1)
    grad = rng.normal(size=tuple(result.shape))
    (expected,) = torch.autograd.grad(result, tensor, torch.from_numpy(grad))
    (slope,) = run_rule(getattr(relax.op.nn, f"max_pool{rank}d"), [data], [grad], **attrs)
    np.testing.assert_allclose(slope, expected.numpy(), rtol=1e-12)


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
    (slope,) = run_rule(builder, [data], [grad], out_layout=f"NC{SPATIAL[rank]}", **attrs)
    np.testing.assert_array_equal(slope, expected)
    assert np.any(slope)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max", "avg", "adaptive_avg"])
def test_refuses_a_part_of_a_spatial_axis(kind, rank):
    """TVM infers the type of such a pooling but does not compile it."""
    name, layout = f"{kind}_pool{rank}d", f"NC{SPATIAL[rank]}4w"
    x = relax.Var("x", relax.TensorType((1, 2, *(6,) * rank, 4), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            pooled = bb.emit(getattr(relax.op.nn, name)(x, 2, layout=layout), "pooled")
            loss = bb.emit_output(relax.op.sum(pooled))
        bb.emit_func_output(loss)
    with pytest.raises(GradientError, match="with parts of N and C at most") as caught:
        relax.transform.Gradient("main")(bb.get())
    assert f"relax.nn.{name}" in str(caught.value)
    assert "'pooled'" in str(caught.value)
