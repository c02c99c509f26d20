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
    "stride larger than the kernel": ((1, 2, 7, 8), (2, 2, 2, 1), {"strides": (4, 3)}),
    "one output element": ((2, 3, 3, 2), (4, 3, 3, 2), {}),
}

_CONV2D_TRANSPOSE = {
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
    "padding larger than the kernel": ((1, 2, 4, 3), (2, 2, 2, 2), {"strides": 3, "padding": 2}),
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
    yield Sample(
        [rng.normal(size=(3, 2, 5, 2)), rng.normal(size=(3, 3, 2, 4))],
        {"data_layout": "CNHW", "kernel_layout": "IHWO", "dilation": (1, 2), "padding": (0, 1)},
        wrt=[1],
        note="CNHW and IHWO, only the weight",
    )


@register_samples("relax.nn.conv2d_transpose")
def conv2d_transpose(rng):
    for note, (data, weight, attrs) in _CONV2D_TRANSPOSE.items():
        yield Sample(
            [rng.normal(size=data), rng.normal(size=weight)],
            attrs,
            symbolic={0: {0: "n", 2: "h"}},
            torch=_torch_conv2d_transpose(**attrs),
            note=note,
        )


@register_samples("relax.grad.conv2d_backward_data")
def conv2d_backward_data(rng):
    yield Sample(
        [rng.normal(size=(2, 4, 2, 3)), (2, 2, 5, 4), rng.normal(size=(4, 1, 2, 3))],
        {"groups": 2, "strides": (2, 1), "padding": (0, 1, 0, 0)},
        note="rows of the data that the stride leaves out",
    )


@register_samples("relax.grad.conv2d_backward_weight")
def conv2d_backward_weight(rng):
    yield Sample(
        [rng.normal(size=(2, 4, 2, 3)), rng.normal(size=(2, 2, 5, 4)), (4, 1, 2, 3)],
        {"groups": 2, "strides": (2, 1), "padding": (0, 1, 0, 0)},
        note="rows of the data that the stride leaves out",
    )


def _torch_conv2d(strides=1, padding=0, dilation=1, groups=1):
    def forward(torch, data, weight):
        top, left, bottom, right = padding if isinstance(padding, tuple) else (padding,) * 4
        data = torch.nn.functional.pad(data, (left, right, top, bottom))
        return torch.nn.functional.conv2d(data, weight, None, strides, 0, dilation, groups)

    return forward


def _torch_conv2d_transpose(strides=1, padding=0, output_padding=0, dilation=1, groups=1):
    """PyTorch has no asymmetric padding here: crop the result without padding, widened at the end."""

    def forward(torch, data, weight):
        pads = (padding,) * 2 if isinstance(padding, int) else padding
        top, left, bottom, right = pads * 2 if len(pads) == 2 else pads
        down, over = (output_padding,) * 2 if isinstance(output_padding, int) else output_padding
        full = torch.nn.functional.conv_transpose2d(
            data, weight, None, strides, 0, 0, groups, dilation
        )
        widened = torch.nn.functional.pad(full, (0, over, 0, down))
        return torch.nn.functional.pad(widened, (-left, -right, -top, -bottom))

    return forward
