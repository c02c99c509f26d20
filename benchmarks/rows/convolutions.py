"""Convolutions with the shapes that kernels are tuned for, with shapes of networks, and with
unusual shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch.nn import functional as F
from tvm import relax
from tvm.relax.op import grad

from ._form import Row


@dataclass(frozen=True)
class Conv:
    """A convolution in NC(D)(H)W, padded by half the kernel. A number as ``size`` means a square
    image."""

    batch: int
    channels: int
    size: int | tuple[int, ...]
    filters: int
    kernel: int
    stride: int = 1
    groups: int = 1
    dilation: int = 1

    def __str__(self) -> str:
        size = f"{self.size}²" if isinstance(self.size, int) else "x".join(map(str, self.size))
        kernel = "x".join([str(self.kernel)] * self.rank)
        parts = [f"{self.batch}x{self.channels}x{size} -> {self.filters}, {kernel}"]
        if self.stride > 1:
            parts.append(f"stride {self.stride}")
        if self.dilation > 1:
            parts.append(f"dilation {self.dilation}")
        if self.groups > 1:
            parts.append("depthwise" if self.groups == self.channels else f"{self.groups} groups")
        return ", ".join(parts)

    @property
    def extents(self) -> tuple[int, ...]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def padding(self) -> int:
        return self.dilation * (self.kernel // 2)

    def rows(self) -> list[Row]:
        """Return the rows of the forward pass, the data gradient and the weight gradient."""
        rank, padding = self.rank, self.padding
        reach = self.dilation * (self.kernel - 1)
        out = [(extent + 2 * padding - reach - 1) // self.stride + 1 for extent in self.extents]
        x = (self.batch, self.channels, *self.extents)
        w = (self.filters, self.channels // self.groups, *[self.kernel] * rank)
        y = (self.batch, self.filters, *out)
        how = {
            "strides": [self.stride] * rank,
            "padding": [padding] * 2 * rank,
            "dilation": [self.dilation] * rank,
            "groups": self.groups,
        }
        forward = getattr(relax.op.nn, f"conv{rank}d")
        backward_data = getattr(grad, f"conv{rank}d_backward_data")
        backward_weight = getattr(grad, f"conv{rank}d_backward_weight")
        empty_x, empty_w = torch.empty(1).expand(x), torch.empty(1).expand(w)
        flops = 2 * prod(y) * prod(w[1:])
        return [
            Row(
                "conv",
                f"forward {self}",
                [x, w],
                lambda _, data, weight: forward(data, weight, **how),
                self._in_torch,
                flops=flops,
            ),
            Row(
                "conv",
                f"data gradient {self}",
                [y, w],
                lambda _, output_grad, weight: backward_data(
                    output_grad, [output_grad.ty.shape[0], *x[1:]], weight, **how
                ),
                lambda output_grad, weight: self._torch_gradient(0, output_grad, empty_x, weight),
                flops=flops,
            ),
            Row(
                "conv",
                f"weight gradient {self}",
                [y, x],
                lambda _, output_grad, data: backward_weight(output_grad, data, w, **how),
                lambda output_grad, data: self._torch_gradient(1, output_grad, data, empty_w),
                flops=flops,
            ),
        ]

    def _in_torch(self, data, weight):
        function = getattr(F, f"conv{self.rank}d")
        return function(data, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def _torch_gradient(self, which: int, output_grad, data, weight):
        rank = self.rank
        how = [self.stride] * rank, [self.padding] * rank, [self.dilation] * rank
        wanted = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(
            output_grad, data, weight, None, *how, False, [0] * rank, self.groups, wanted
        )[which]


_DEVELOPED = [
    *(Conv(8, 3, 224, 64, 7, 2), Conv(8, 64, 56, 64, 3), Conv(8, 128, 28, 128, 3)),
    *(Conv(8, 256, 14, 256, 3), Conv(8, 512, 7, 512, 3)),
]

_RESNET50 = [
    Conv(8, channels, size, filters, kernel, stride)
    for channels, size, filters, kernel, stride in [
        *((64, 56, 64, 1, 1), (64, 56, 256, 1, 1), (256, 56, 64, 1, 1), (256, 56, 128, 1, 1)),
        *((128, 56, 128, 3, 2), (128, 28, 512, 1, 1), (256, 56, 512, 1, 2), (512, 28, 128, 1, 1)),
        *((512, 28, 256, 1, 1), (256, 28, 256, 3, 2), (256, 14, 1024, 1, 1)),
        *((512, 28, 1024, 1, 2), (1024, 14, 256, 1, 1), (1024, 14, 512, 1, 1)),
        *((512, 14, 512, 3, 2), (512, 7, 2048, 1, 1), (1024, 14, 2048, 1, 2)),
        (2048, 7, 512, 1, 1),
    ]
]

_MOBILENET_V2 = [
    Conv(8, channels, size, channels, 3, stride, channels)
    for channels, size, stride in [
        *((32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (192, 28, 1)),
        *((192, 28, 2), (384, 14, 1), (576, 14, 1), (576, 14, 2), (960, 7, 1)),
    ]
]

#: Channels that do not fill vectors, groups (as in ResNeXt), dilation, larger kernels, and other
#: ranks.
_UNUSUAL = [
    Conv(8, 60, 28, 70, 3),
    Conv(8, 33, 57, 47, 3),
    Conv(8, 60, 28, 70, 1),
    Conv(8, 128, 56, 128, 3, 1, 32),
    Conv(8, 256, 28, 256, 3, 1, 32),
    replace(Conv(8, 64, 56, 64, 3), dilation=2),
    Conv(8, 64, 28, 64, 5),
    Conv(8, 64, (1024,), 64, 3),
    Conv(8, 64, (1024,), 64, 7),
    Conv(4, 16, (16, 28, 28), 32, 3),
]


def _transposed(batch: int, channels: int, size: int, filters: int, kernel: int) -> list[Row]:
    """Return the rows of a transposed convolution that doubles the extents of images, and of its
    gradients."""
    name = f"{batch}x{channels}x{size}² -> {filters}, {kernel}x{kernel}, transposed, stride 2"
    padding = kernel // 2 - 1  # of an even kernel
    shapes = [(batch, channels, size, size), (channels, filters, kernel, kernel)]
    result = (batch, filters, 2 * size, 2 * size)
    flops = 2 * prod(shapes[0]) * prod(shapes[1][1:])

    def in_relax(_, data, weight):
        return relax.op.nn.conv2d_transpose(data, weight, strides=2, padding=padding)

    def in_torch(data, weight):
        return F.conv_transpose2d(data, weight, None, 2, padding)

    def gradients(data, weight, output_grad):
        how = [2, 2], [padding] * 2, [1, 1], True, [0, 0], 1, [True, True, False]
        backward = torch.ops.aten.convolution_backward
        return backward(output_grad, data, weight, None, *how)[:2]

    return [
        Row("conv", f"forward {name}", shapes, in_relax, in_torch, flops=flops),
        Row(
            "conv",
            f"gradients {name}",
            [*shapes, result],
            in_relax,
            gradients,
            wrt=(0, 1),
            flops=2 * flops,
        ),
    ]


_TRANSPOSED = [(4, 48, 64, 24, 2), (8, 256, 28, 128, 2), (8, 64, 32, 32, 4), (16, 128, 7, 64, 4)]

ROWS = [
    *(row for conv in [*_DEVELOPED, *_RESNET50, *_MOBILENET_V2, *_UNUSUAL] for row in conv.rows()),
    *(row for sizes in _TRANSPOSED for row in _transposed(*sizes)),
]
