"""Samples of pooling and its backward operators."""

from __future__ import annotations

import numpy as np

from ._sample import Sample, register_samples

_MAX_POOL2D = {
    "windows that tile the data": ((2, 3, 4, 6), {"pool_size": (2, 3), "strides": (2, 3)}),
    "windows that overlap": ((2, 2, 7, 6), {"pool_size": 3, "strides": 2, "padding": 1}),
    "windows that leave elements out": ((1, 2, 8, 7), {"pool_size": (1, 2), "strides": 3}),
    "asymmetric padding": (
        (1, 2, 5, 6),
        {"pool_size": (3, 2), "strides": (1, 2), "padding": (0, 1, 2, 0)},
    ),
    "dilation": ((1, 2, 8, 9), {"pool_size": 3, "strides": 2, "dilation": (2, 3), "padding": 1}),
    "ceil_mode": ((1, 2, 6, 7), {"pool_size": 3, "strides": 2, "ceil_mode": True}),
    "ceil_mode drops a window that starts in the padding": (
        (1, 1, 4, 5),
        {"pool_size": 2, "strides": 3, "padding": 1, "ceil_mode": True},
    ),
    "windows of one element": ((2, 1, 3, 3), {"pool_size": 1}),
}

_AVG_POOL2D = {
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
}


@register_samples("relax.nn.max_pool2d")
def max_pool2d(rng):
    for note, (shape, attrs) in _MAX_POOL2D.items():
        yield Sample(
            [_distinct(rng, shape)],
            attrs,
            symbolic=_symbolic(attrs),
            torch=_torch_max_pool2d(**attrs),
            note=note,
        )
    attrs = {"pool_size": (2, 3), "strides": 2, "padding": (1, 0, 0, 1), "layout": "NHWC"}
    yield Sample(
        [_distinct(rng, (2, 5, 6, 3))],
        attrs,
        symbolic={0: {0: "n"}},
        torch=_torch_max_pool2d(**attrs),
        note="NHWC",
    )
    attrs = {"pool_size": 3, "strides": 2, "padding": 1}
    yield Sample(
        [rng.integers(0, 3, (2, 2, 7, 6)).astype("float64")],
        attrs,
        torch=_torch_max_pool2d(**attrs),
        smooth=False,
        note="ties: the first of the largest elements takes it all",
    )
    yield Sample(
        [np.zeros((1, 1, 5, 5))],
        attrs,
        torch=_torch_max_pool2d(**attrs),
        smooth=False,
        note="all elements equal",
    )


@register_samples("relax.nn.avg_pool2d")
def avg_pool2d(rng):
    for note, (shape, attrs) in _AVG_POOL2D.items():
        yield Sample(
            [rng.normal(size=shape)],
            attrs,
            symbolic=_symbolic(attrs),
            torch=_torch_avg_pool2d(**attrs),
            note=note,
        )
    yield Sample(
        [rng.normal(size=(1, 6, 7, 2))],
        {
            "pool_size": (3, 2),
            "strides": 2,
            "dilation": (1, 2),
            "padding": (0, 1, 2, 0),
            "ceil_mode": True,
            "layout": "NHWC",
        },
        symbolic={0: {0: "n"}},
        note="asymmetric padding, dilation and NHWC, which PyTorch does not have",
    )
    yield Sample(
        [rng.normal(size=(1, 1, 4, 3))],
        {"pool_size": 2, "padding": (3, 0, 2, 1), "count_include_pad": True},
        note="windows that hold only padding",
    )


@register_samples("relax.grad.max_pool2d_backward")
def max_pool2d_backward(rng):
    yield from _backward_samples(rng)


@register_samples("relax.grad.avg_pool2d_backward")
def avg_pool2d_backward(rng):
    yield from _backward_samples(rng)


def _backward_samples(rng):
    attrs = {"pool_size": [3, 3], "strides": [2, 2], "padding": [1, 1, 1, 1]}
    yield Sample(
        [rng.normal(size=(2, 2, 3, 4)), _distinct(rng, (2, 2, 5, 7))],
        attrs,
        wrt=[0],
        symbolic={0: {0: "n"}, 1: {0: "n"}},
        note="the gradient with respect to output_grad",
    )
    yield Sample(
        [rng.normal(size=(2, 3, 4, 1)), _distinct(rng, (1, 2, 5, 7))],
        {**attrs, "out_layout": "CHWN"},
        note="data in NCHW, output_grad in CHWN; the gradient with respect to data is 0",
    )


@register_samples("relax.grad.max_pool2d_jvp")
def max_pool2d_jvp(rng):
    yield Sample(
        [rng.normal(size=(2, 2, 6, 5)), _distinct(rng, (2, 2, 6, 5))],
        {"pool_size": (3, 2), "strides": 2, "padding": (0, 1, 1, 0)},
        wrt=[0],
        symbolic={0: {0: "n", 2: "h"}, 1: {0: "n", 2: "h"}},
        note="the gradient with respect to data_tangent",
    )
    yield Sample(
        [rng.normal(size=(1, 5, 6, 2)), _distinct(rng, (1, 5, 6, 2))],
        {"pool_size": 2, "dilation": (2, 1), "layout": "NHWC", "out_layout": "NCHW"},
        note="data in NHWC, result in NCHW; the gradient with respect to data is 0",
    )


def _symbolic(attrs):
    """TVM does not copy, and so does not differentiate, a function with the condition in a type that
    ceil_mode makes of a symbolic extent."""
    return {0: {0: "n"}} if attrs.get("ceil_mode") else {0: {0: "n", 2: "h", 3: "w"}}


def _distinct(rng, shape):
    """Return values of which no two are near each other, in half precision either."""
    return rng.permutation(np.arange(np.prod(shape))).reshape(shape) / 16 - 1.5


def _torch_max_pool2d(pool_size, strides=1, padding=0, dilation=1, ceil_mode=False, layout="NCHW"):
    sizes, steps, gaps = (_pair(value) for value in (pool_size, strides, dilation))
    top, left, bottom, right = padding if isinstance(padding, tuple) else (padding,) * 4

    def windows(extent, axis, before, after):
        """How many windows TVM has: of those that ceil_mode adds, it drops one, as PyTorch does, if
        it starts in the padding after the data; PyTorch takes padding in the data for data."""
        space = extent + before + after - (sizes[axis] - 1) * gaps[axis] - 1
        if not ceil_mode:
            return space // steps[axis] + 1
        count = -(-space // steps[axis]) + 1
        return count - 1 if (count - 1) * steps[axis] >= extent + before else count

    def forward(torch, data):
        data = data.permute([layout.index(name) for name in "NCHW"])
        rows = windows(data.shape[2], 0, top, bottom)
        columns = windows(data.shape[3], 1, left, right)
        padded = torch.nn.functional.pad(data, (left, right, top, bottom), value=-float("inf"))
        result = torch.nn.functional.max_pool2d(padded, sizes, steps, 0, gaps, ceil_mode=ceil_mode)[
            :, :, :rows, :columns
        ]
        return result.permute(["NCHW".index(name) for name in layout])

    return forward


def _torch_avg_pool2d(pool_size, strides=1, padding=0, ceil_mode=False, count_include_pad=False):
    def forward(torch, data):
        return torch.nn.functional.avg_pool2d(
            data, pool_size, strides, padding, ceil_mode, count_include_pad
        )

    return forward


def _pair(value):
    return value if isinstance(value, tuple) else (value, value)
