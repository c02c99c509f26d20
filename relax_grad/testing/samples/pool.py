"""Samples of pooling and its backward operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

# Shapes of the data and attributes, by the number of spatial axes.
_Cases = dict[int, dict[str, tuple[tuple[int, ...], dict[str, Any]]]]

_MAX_POOL: _Cases = {
    1: {
        "windows that tile the data": ((2, 2, 6), {"pool_size": 2, "strides": 2}),
        "windows that overlap": (
            (2, 2, 7),
            {"pool_size": 3, "strides": 2, "padding": 1},
        ),
        "asymmetric padding, dilation": (
            (1, 2, 8),
            {"pool_size": 3, "strides": 2, "padding": (0, 2), "dilation": 2},
        ),
        "ceil_mode": ((1, 2, 6), {"pool_size": 3, "strides": 2, "ceil_mode": True}),
    },
    2: {
        "windows that tile the data": ((2, 3, 4, 6), {"pool_size": (2, 3), "strides": (2, 3)}),
        "windows that overlap": ((2, 2, 7, 6), {"pool_size": 3, "strides": 2, "padding": 1}),
        "windows that leave elements out": ((1, 2, 8, 7), {"pool_size": (1, 2), "strides": 3}),
        "asymmetric padding": (
            (1, 2, 5, 6),
            {"pool_size": (3, 2), "strides": (1, 2), "padding": (0, 1, 2, 0)},
        ),
        "dilation": (
            (1, 2, 8, 9),
            {"pool_size": 3, "strides": 2, "dilation": (2, 3), "padding": 1},
        ),
        "ceil_mode": ((1, 2, 6, 7), {"pool_size": 3, "strides": 2, "ceil_mode": True}),
        "ceil_mode drops a window that starts in the padding": (
            (1, 1, 4, 5),
            {"pool_size": 2, "strides": 3, "padding": 1, "ceil_mode": True},
        ),
        "windows of one element": ((2, 1, 3, 3), {"pool_size": 1}),
    },
    3: {
        "windows that overlap": (
            (1, 2, 3, 4, 3),
            {"pool_size": (2, 3, 2), "strides": (2, 1, 1), "padding": (1, 1, 0, 0, 1, 1)},
        ),
        "ceil_mode, dilation": (
            (1, 1, 4, 3, 5),
            {"pool_size": 2, "strides": 2, "dilation": (1, 1, 3), "ceil_mode": True},
        ),
    },
}

_AVG_POOL: _Cases = {
    1: {
        "windows that overlap": (
            (2, 2, 7),
            {"pool_size": 3, "strides": 2, "padding": 1, "count_include_pad": False},
        ),
        "ceil_mode, padding counts": (
            (1, 2, 6),
            {
                "pool_size": 3,
                "strides": 2,
                "padding": 1,
                "ceil_mode": True,
                "count_include_pad": True,
            },
        ),
        "windows that leave elements out": ((1, 2, 8), {"pool_size": 2, "strides": 3}),
    },
    2: {
        "windows that tile the data": ((2, 3, 4, 6), {"pool_size": (2, 3), "strides": (2, 3)}),
        "windows that overlap": ((2, 2, 7, 6), {"pool_size": 3, "strides": 2, "padding": 1}),
        "padding counts": (
            (1, 2, 7, 6),
            {"pool_size": 3, "strides": 2, "padding": 1, "count_include_pad": True},
        ),
        "ceil_mode": ((1, 2, 6, 7), {"pool_size": 3, "strides": 2, "ceil_mode": True}),
        "ceil_mode, padding counts": (
            (1, 2, 6, 8),
            {
                "pool_size": (3, 2),
                "strides": (2, 3),
                "padding": 1,
                "ceil_mode": True,
                "count_include_pad": True,
            },
        ),
        "windows that leave elements out": ((1, 2, 8, 7), {"pool_size": (1, 2), "strides": 3}),
    },
    3: {
        "windows that overlap": (
            (1, 2, 3, 4, 3),
            {
                "pool_size": (2, 3, 2),
                "strides": (2, 1, 1),
                "padding": 1,
                "count_include_pad": False,
            },
        ),
        "ceil_mode, padding counts": (
            (1, 1, 3, 4, 2),
            {
                "pool_size": 2,
                "strides": (3, 2, 1),
                "padding": (1, 0, 1, 1, 0, 1),
                "ceil_mode": True,
                "count_include_pad": True,
            },
        ),
    },
}

_ADAPTIVE_AVG_POOL: _Cases = {
    1: {
        "mean of all": ((2, 2, 5), {"output_size": 1}),
        "windows that overlap": ((2, 2, 7), {"output_size": 3}),
        "more windows than elements": ((1, 2, 3), {"output_size": (7,)}),
        "as many windows as elements": ((1, 2, 3), {}),
    },
    2: {
        "mean of all": ((2, 3, 4, 5), {"output_size": 1}),
        "windows that tile the data": ((1, 2, 6, 4), {"output_size": (3, 2)}),
        "windows that overlap, more windows than elements": (
            (1, 2, 5, 3),
            {"output_size": (3, 4)},
        ),
        "as many windows as elements": ((1, 2, 3, 2), {}),
    },
    3: {
        "mean of all": ((2, 2, 2, 3, 2), {"output_size": 1}),
        "windows that overlap, more windows than elements": (
            (1, 2, 3, 2, 4),
            {"output_size": (2, 3, 2)},
        ),
    },
}


def _max_pool(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    for note, (shape, attrs) in _MAX_POOL[rank].items():
        yield Sample(
            [_distinct(rng, shape)],
            attrs,
            symbolic=_symbolic(attrs),
            torch=_torch_max_pool(rank, **attrs),
            note=note,
        )
    shape, attrs = _channels_last(rank, {"strides": 2, "padding": 1})
    yield Sample(
        [_distinct(rng, shape)],
        attrs,
        symbolic={0: {0: "n"}},
        torch=_torch_max_pool(rank, **attrs),
        note=attrs["layout"],
    )
    attrs = {"pool_size": 3, "strides": 2, "padding": 1}
    yield Sample(
        [rng.integers(0, 3, (2, 2, 7, 6, 3)[: rank + 2]).astype("float64")],
        attrs,
        torch=_torch_max_pool(rank, **attrs),
        smooth=False,
        note="ties: the first of the largest elements takes it all",
    )
    yield Sample(
        [np.zeros((1, 1, 5, 5, 2)[: rank + 2])],
        attrs,
        torch=_torch_max_pool(rank, **attrs),
        smooth=False,
        note="all elements equal",
    )


def _avg_pool(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    for note, (shape, attrs) in _AVG_POOL[rank].items():
        yield Sample(
            [rng.normal(size=shape)],
            attrs,
            symbolic=_symbolic(attrs),
            torch=_torch_avg_pool(rank, **attrs) if _is_torch_s(attrs) else None,
            note=note,
        )
    shape, attrs = _channels_last(rank, {"strides": 2, "ceil_mode": True, "dilation": 2})
    yield Sample(
        [rng.normal(size=shape)],
        {**attrs, "padding": (0, 1, 0, 2, 0, 1)[: 2 * rank]},
        symbolic={0: {0: "n"}},
        note=f"asymmetric padding, dilation and {attrs['layout']}, which PyTorch does not have",
    )
    yield Sample(
        [rng.normal(size=(1, 1, 4, 3, 2)[: rank + 2])],
        {
            "pool_size": 2,
            "padding": (3, 0, 0, 2, 1, 0)[: 2 * rank],
            "count_include_pad": True,
        },
        note="windows that hold only padding",
    )


def _adaptive_avg_pool(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    for note, (shape, attrs) in _ADAPTIVE_AVG_POOL[rank].items():
        yield Sample(
            [rng.normal(size=shape)],
            attrs,
            symbolic={0: {0: "n", 2: "d"}},
            torch=_torch_adaptive_avg_pool(rank, **attrs),
            note=note,
        )
    layout, out_layout = f"N{'DHW'[-rank:]}C2c", f"C{'DHW'[-rank:]}N"
    yield Sample(
        [rng.normal(size=(1, *(4, 3, 2)[:rank], 1, 2))],
        {"output_size": (2, 2, 3)[:rank], "layout": layout, "out_layout": out_layout},
        note=f"{layout}, the result in {out_layout}",
    )


# Extents of the output gradient and of the data, for windows of 3 elements with stride 2.
_BACKWARD = {1: ((4,), (7,)), 2: ((3, 4), (5, 7)), 3: ((2, 1, 2), (3, 2, 4))}


def _backward(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    out, extents = _BACKWARD[rank]
    attrs = {"pool_size": [3] * rank, "strides": [2] * rank, "padding": [1] * 2 * rank}
    yield Sample(
        [rng.normal(size=(2, 2, *out)), _distinct(rng, (2, 2, *extents))],
        attrs,
        wrt=[0],
        symbolic={0: {0: "n"}, 1: {0: "n"}},
        note="the gradient with respect to output_grad",
    )
    layout = f"NC{'DHW'[-rank:]}4c"
    yield Sample(
        [rng.normal(size=(1, 1, *out, 4)), _distinct(rng, (1, 2, *extents))],
        {**attrs, "out_layout": layout},
        note=f"output_grad in {layout}, not full; the gradient with respect to data is 0",
    )


def _adaptive_backward(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    out = (3, 4, 1)[:rank]
    yield Sample(
        [rng.normal(size=(2, 1, *out)), rng.normal(size=(2, 1, *(5, 3, 2)[:rank]))],
        {"output_size": out},
        wrt=[0],
        symbolic={0: {0: "n"}, 1: {0: "n", 2: "d"}},
        note="the gradient with respect to output_grad",
    )


def _jvp(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    shape = (2, 2, 6, 5, 2)[: rank + 2]
    symbolic = {0: "n", 2: "h"}
    yield Sample(
        [rng.normal(size=shape), _distinct(rng, shape)],
        {"pool_size": (3, 2, 2)[:rank], "strides": 2, "padding": (0, 1, 1, 0, 0, 1)[: 2 * rank]},
        wrt=[0],
        symbolic={0: symbolic, 1: symbolic},
        note="the gradient with respect to data_tangent",
    )
    spatial = "DHW"[-rank:]
    shape = (1, *(5, 6, 2)[:rank], 2)
    yield Sample(
        [rng.normal(size=shape), _distinct(rng, shape)],
        {
            "pool_size": 2,
            "dilation": (2, 1, 1)[:rank],
            "layout": f"N{spatial}C",
            "out_layout": f"NC{spatial}",
        },
        note="data with the channels last, result not; the gradient with respect to data is 0",
    )


for _rank in (1, 2, 3):
    for _op, _maker in (
        (f"nn.max_pool{_rank}d", _max_pool),
        (f"nn.avg_pool{_rank}d", _avg_pool),
        (f"nn.adaptive_avg_pool{_rank}d", _adaptive_avg_pool),
        (f"grad.max_pool{_rank}d_backward", _backward),
        (f"grad.avg_pool{_rank}d_backward", _backward),
        (f"grad.max_pool{_rank}d_jvp", _jvp),
        (f"grad.adaptive_avg_pool{_rank}d_backward", _adaptive_backward),
    ):
        register_samples(f"relax.{_op}")(functools.partial(_maker, _rank))


def _symbolic(attrs: Any) -> Any:
    """Return the symbolic axes of the data: only the batch with ceil_mode.

    For a symbolic spatial extent, ceil_mode puts a condition into a type. TVM does not copy, and
    therefore does not differentiate, a function with such a type.
    """
    return {0: {0: "n"}} if attrs.get("ceil_mode") else {0: {0: "n", 2: "h"}}


def _channels_last(rank: int, attrs: Any) -> Any:
    """Return a shape and attributes for data in a channels-last layout."""
    sizes = {"pool_size": (2, 3, 2)[:rank], "layout": f"N{'DHW'[-rank:]}C"}
    return (1, *(5, 6, 4)[:rank], 2), {**attrs, **sizes}


def _distinct(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Return values that are pairwise well apart, even in half precision."""
    return rng.permutation(np.arange(np.prod(shape))).reshape(shape) / 16 - 1.5


def _per_axis(value: Any, count: int) -> Any:
    return value if isinstance(value, tuple) else (value,) * count


def _torch_max_pool(
    rank: int,
    pool_size: Any,
    strides: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: Any = False,
    layout: str | None = None,
) -> Callable[..., Any]:
    plain = f"NC{'DHW'[-rank:]}"
    layout = layout or plain
    sizes, steps, gaps = (_per_axis(value, rank) for value in (pool_size, strides, dilation))
    padding = _per_axis(padding, 2 * rank)
    before, after = padding[:rank], padding[rank:]

    def windows(extent: Any, axis: int) -> Any:
        """Return TVM's number of windows along an axis.

        ceil_mode may add a window. TVM drops it, as PyTorch does, if it starts in the padding after
        the data. Here the data is padded first, and PyTorch would count that padding as data.
        """
        space = extent + before[axis] + after[axis] - (sizes[axis] - 1) * gaps[axis] - 1
        if not ceil_mode:
            return space // steps[axis] + 1
        count = -(-space // steps[axis]) + 1
        return count - 1 if (count - 1) * steps[axis] >= extent + before[axis] else count

    def forward(torch: Any, data: Any) -> Any:
        data = data.permute([layout.index(name) for name in plain])
        counts = [windows(extent, axis) for axis, extent in enumerate(data.shape[2:])]
        pads = [size for axis in reversed(range(rank)) for size in (before[axis], after[axis])]
        padded = torch.nn.functional.pad(data, pads, value=-float("inf"))
        pool = getattr(torch.nn.functional, f"max_pool{rank}d")
        result = pool(padded, sizes, steps, 0, gaps, ceil_mode=ceil_mode)
        result = result[(slice(None), slice(None), *map(slice, counts))]
        return result.permute([plain.index(name) for name in layout])

    return forward


def _torch_avg_pool(
    rank: int,
    pool_size: Any,
    strides: Any = 1,
    padding: Any = 0,
    ceil_mode: Any = False,
    count_include_pad: Any = False,
) -> Callable[..., Any]:
    def forward(torch: Any, data: Any) -> Any:
        pool = getattr(torch.nn.functional, f"avg_pool{rank}d")
        return pool(data, pool_size, strides, padding, ceil_mode, count_include_pad)

    return forward


def _is_torch_s(attrs: Any) -> Any:
    """Tell whether PyTorch's average pooling supports the padding, which must be the same before
    and after."""
    return isinstance(attrs.get("padding", 0), int)


def _torch_adaptive_avg_pool(rank: int, output_size: Any = None) -> Callable[..., Any]:
    def forward(torch: Any, data: Any) -> Any:
        sizes = tuple(data.shape[2:]) if output_size is None else _per_axis(output_size, rank)
        return getattr(torch.nn.functional, f"adaptive_avg_pool{rank}d")(data, sizes)

    return forward
