"""Samples of the convolutions and their backward operators."""

from __future__ import annotations

from ._sample import Sample, register_samples

_CONV2D = {
    "plain": ((2, 3, 6, 5), (4, 3, 3, 3), {}),
    "stride that does not divide": ((1, 2, 8, 7), (3, 2, 3, 2), {"strides": (3, 2), "padding": 1}),
    "groups and dilation": (
        (2, 4, 9, 8),
        (6, 2, 3, 2),
        {"groups": 2, "dilation": (2, 3), "strides": (2, 1), "padding": (1, 0, 2, 1)},
    ),
    "depthwise, multiplier 2": ((2, 3, 5, 5), (6, 1, 3, 3), {"groups": 3, "padding": 1}),
    "1x1 kernel": ((2, 5, 4, 4), (3, 5, 1, 1), {"strides": 2}),
    "kernel larger than the data": ((1, 2, 2, 3), (2, 2, 5, 4), {"padding": (2, 1, 2, 2)}),
}


@register_samples("relax.nn.conv2d")
def conv2d(rng):
    for note, (data, weight, attrs) in _CONV2D.items():
        yield Sample(
            [rng.normal(size=data), rng.normal(size=weight)],
            attrs,
            symbolic={0: {0: "n", 2: "h"}},
            torch=_torch_conv2d(**attrs),
            note=note,
        )
    yield Sample(
        [rng.normal(size=(2, 6, 5, 4)), rng.normal(size=(3, 2, 2, 6))],
        {
            "groups": 2,
            "data_layout": "NHWC",
            "kernel_layout": "HWIO",
            "strides": (2, 1),
            "padding": (1, 1, 0, 1),
        },
        symbolic={0: {0: "n"}},
        note="NHWC and HWIO",
    )


def _torch_conv2d(strides=1, padding=0, dilation=1, groups=1):
    def forward(torch, data, weight):
        top, left, bottom, right = padding if isinstance(padding, tuple) else (padding,) * 4
        data = torch.nn.functional.pad(data, (left, right, top, bottom))
        return torch.nn.functional.conv2d(data, weight, None, strides, 0, dilation, groups)

    return forward
