"""Samples of the convolutions and their backward operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ._sample import Sample, register_samples

# Shapes of data and weight in the plain layouts, and attributes, by rank.
_Case = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]

_CONV: dict[int, dict[str, _Case]] = {
    1: {
        "plain": ((2, 3, 6), (4, 3, 3), {}),
        "stride that does not divide": ((1, 2, 8), (3, 2, 3), {"strides": 3, "padding": 1}),
        "groups, dilation, asymmetric padding": (
            (2, 4, 9),
            (6, 2, 3),
            {"groups": 2, "dilation": 2, "strides": 2, "padding": (1, 2)},
        ),
        "depthwise, multiplier 2": ((2, 3, 5), (6, 1, 3), {"groups": 3, "padding": 1}),
        "kernel larger than the data": ((1, 2, 2), (2, 2, 4), {"padding": (1, 2)}),
    },
    2: {
        "plain": ((2, 3, 6, 5), (4, 3, 3, 3), {}),
        "stride that does not divide": (
            (1, 2, 8, 7),
            (3, 2, 3, 2),
            {"strides": (3, 2), "padding": 1},
        ),
        "groups and dilation": (
            (2, 4, 9, 8),
            (6, 2, 3, 2),
            {"groups": 2, "dilation": (2, 3), "strides": (2, 1), "padding": (1, 0, 2, 1)},
        ),
        "depthwise, multiplier 2": ((2, 3, 5, 5), (6, 1, 3, 3), {"groups": 3, "padding": 1}),
        "1x1 kernel": ((2, 5, 4, 4), (3, 5, 1, 1), {"strides": 2}),
        "kernel larger than the data": ((1, 2, 2, 3), (2, 2, 5, 4), {"padding": (2, 1, 2, 2)}),
        "stride larger than the kernel": ((1, 2, 7, 8), (2, 2, 2, 1), {"strides": (4, 3)}),
        "one output element": ((2, 3, 3, 2), (4, 3, 3, 2), {}),
    },
    3: {
        "plain": ((2, 2, 3, 4, 3), (2, 2, 2, 3, 2), {}),
        "groups, dilation, stride, asymmetric padding": (
            (1, 4, 3, 3, 5),
            (2, 2, 2, 1, 2),
            {
                "groups": 2,
                "dilation": (1, 1, 2),
                "strides": (2, 1, 2),
                "padding": (1, 0, 1, 0, 0, 2),
            },
        ),
        "depthwise, multiplier 2": ((1, 2, 2, 3, 2), (4, 1, 2, 2, 1), {"groups": 2, "padding": 1}),
    },
}

_CONV_TRANSPOSE: dict[int, dict[str, _Case]] = {
    1: {
        "plain": ((2, 3, 3), (3, 2, 3), {}),
        "output padding": (
            (2, 2, 3),
            (2, 3, 3),
            {"strides": 3, "padding": (1, 2), "output_padding": 2},
        ),
        "groups and dilation": (
            (2, 4, 3),
            (4, 3, 2),
            {"groups": 2, "dilation": 3, "strides": 2, "padding": 1},
        ),
        "padding larger than the kernel": ((1, 2, 4), (2, 2, 2), {"strides": 3, "padding": 2}),
    },
    2: {
        "plain": ((2, 3, 3, 4), (3, 2, 3, 2), {}),
        "output padding": (
            (2, 2, 3, 2),
            (2, 3, 3, 2),
            {"strides": (3, 2), "padding": (1, 0, 2, 1), "output_padding": (2, 1)},
        ),
        "groups and dilation": (
            (2, 4, 3, 2),
            (4, 3, 2, 3),
            {"groups": 2, "dilation": (3, 2), "strides": (1, 2), "padding": (1, 2)},
        ),
        "depthwise, multiplier 2": ((1, 3, 3, 3), (3, 2, 3, 3), {"groups": 3, "strides": 2}),
        "padding larger than the kernel": (
            (1, 2, 4, 3),
            (2, 2, 2, 2),
            {"strides": 3, "padding": 2},
        ),
    },
    3: {
        "plain": ((2, 2, 2, 2, 3), (2, 2, 2, 2, 1), {}),
        "output padding, groups, dilation": (
            (1, 4, 2, 2, 2),
            (4, 1, 1, 2, 2),
            {
                "groups": 2,
                "strides": (2, 1, 3),
                "dilation": (1, 2, 1),
                "padding": (0, 1, 0, 0, 0, 1),
                "output_padding": (1, 0, 2),
            },
        ),
    },
}

# Layouts of data and weight; their shapes are given in the plain layouts.
_LAYOUTS: dict[int, list[tuple[str, str, list[int] | None]]] = {
    1: [("NWC", "WIO", None)],
    2: [("NHWC", "HWIO", None), ("CNHW", "IHWO", [1])],
    3: [("NDHWC", "DHWIO", None)],
}
_LAYOUTS_CONV: dict[int, _Case] = {
    1: ((2, 4, 6), (2, 2, 3), {"groups": 2, "strides": 2, "padding": (1, 0)}),
    2: ((2, 6, 5, 4), (3, 2, 3, 2), {"strides": (2, 1), "padding": (1, 1, 0, 1), "groups": 3}),
    3: ((1, 2, 3, 3, 4), (2, 2, 2, 1, 3), {"strides": (1, 2, 1), "padding": (0, 0, 1, 1, 0, 1)}),
}


def _conv(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    for note, (data, weight, attrs) in _CONV[rank].items():
        yield Sample(
            [rng.normal(size=data), rng.normal(size=weight)],
            attrs,
            symbolic={0: {0: "n", 2: "h"}},
            torch=_torch_conv(rank, **attrs),
            note=note,
        )
    data, weight, attrs = _LAYOUTS_CONV[rank]
    for data_layout, kernel_layout, wrt in _LAYOUTS[rank]:
        yield Sample(
            [
                rng.normal(size=_in_layout(data, "NC", data_layout)),
                rng.normal(size=_in_layout(weight, "OI", kernel_layout)),
            ],
            {**attrs, "data_layout": data_layout, "kernel_layout": kernel_layout},
            wrt=wrt,
            symbolic={0: {data_layout.index("N"): "n"}},
            note=f"{data_layout} and {kernel_layout}",
        )


def _conv_transpose(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    for note, (data, weight, attrs) in _CONV_TRANSPOSE[rank].items():
        yield Sample(
            [rng.normal(size=data), rng.normal(size=weight)],
            attrs,
            symbolic={0: {0: "n", 2: "h"}},
            torch=_torch_conv_transpose(rank, **attrs),
            note=note,
        )
    spatial = "DHW"[-rank:]
    data_layout, kernel_layout = f"N{spatial}C", f"{spatial}OI"
    yield Sample(
        [
            rng.normal(size=_in_layout((1, 2, 3, 2, 2)[: rank + 2], "NC", data_layout)),
            rng.normal(size=_in_layout((2, 1, 2, 2, 1)[: rank + 2], "IO", kernel_layout)),
        ],
        {"strides": 2, "padding": 1, "data_layout": data_layout, "kernel_layout": kernel_layout},
        note=f"{data_layout} and {kernel_layout}",
    )


# Shapes of the output gradient, data and weight, and attributes. The stride skips rows of the data.
_BACKWARD = {
    1: ((2, 4, 2), (2, 2, 5), (4, 1, 2), {"groups": 2, "strides": 2, "padding": (0, 0)}),
    2: (
        (2, 4, 2, 3),
        (2, 2, 5, 4),
        (4, 1, 2, 3),
        {"groups": 2, "strides": (2, 1), "padding": (0, 1, 0, 0)},
    ),
    3: (
        (1, 2, 2, 1, 3),
        (1, 2, 5, 2, 4),
        (2, 1, 2, 2, 3),
        {"groups": 2, "strides": (2, 1, 1), "padding": (0, 0, 1, 0, 0, 0)},
    ),
}


def _backward_data(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    grad, data, weight, attrs = _BACKWARD[rank]
    yield Sample([rng.normal(size=grad), data, rng.normal(size=weight)], attrs)


def _backward_weight(rank: int, rng: np.random.Generator) -> Iterator[Sample]:
    grad, data, weight, attrs = _BACKWARD[rank]
    yield Sample([rng.normal(size=grad), rng.normal(size=data), weight], attrs)


for _rank in _CONV:
    for _op, _maker in (
        (f"nn.conv{_rank}d", _conv),
        (f"nn.conv{_rank}d_transpose", _conv_transpose),
        (f"grad.conv{_rank}d_backward_data", _backward_data),
        (f"grad.conv{_rank}d_backward_weight", _backward_weight),
    ):
        register_samples(f"relax.{_op}")(functools.partial(_maker, _rank))


def _in_layout(shape: Sequence[int], channels: str, layout: str) -> Any:
    """Convert a shape from the plain layout, whose channel axes come first, to another layout."""
    plain = channels + "DHW"[2 - len(shape) :]
    return tuple(shape[plain.index(name)] for name in layout)


def _per_axis(value: Any, rank: int) -> Any:
    return value if isinstance(value, tuple) else (value,) * rank


def _pads(padding: Any, rank: int) -> list:
    """Return the padding in the order of PyTorch's pad: before and after each axis, the last axis
    first."""
    padding = _per_axis(padding, 2 * rank)
    padding = padding * 2 if len(padding) == rank else padding
    return [padding[axis + end] for axis in reversed(range(rank)) for end in (0, rank)]


def _torch_conv(
    rank: int, strides: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Callable[..., Any]:
    def forward(torch: Any, data: Any, weight: Any) -> Any:
        data = torch.nn.functional.pad(data, _pads(padding, rank))
        conv = getattr(torch.nn.functional, f"conv{rank}d")
        return conv(data, weight, None, strides, 0, dilation, groups)

    return forward


def _torch_conv_transpose(
    rank: int,
    strides: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Callable[..., Any]:
    """Return a transposed convolution in PyTorch, with support for asymmetric padding.

    PyTorch's own has symmetric padding only. The unpadded result is extended at the end and then
    cropped.
    """

    def forward(torch: Any, data: Any, weight: Any) -> Any:
        conv = getattr(torch.nn.functional, f"conv_transpose{rank}d")
        full = conv(data, weight, None, strides, 0, 0, groups, dilation)
        more = (0,) * rank + _per_axis(output_padding, rank)
        widened = torch.nn.functional.pad(full, _pads(more, rank))
        return torch.nn.functional.pad(widened, [-size for size in _pads(padding, rank)])

    return forward
