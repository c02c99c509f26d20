"""Pools and their gradients."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from tvm import relax
from tvm.relax.op import grad

from ._form import Row

aten = torch.ops.aten


def _max_pool(data: tuple[int, ...], kernel: int, stride: int, padding: int) -> list[Row]:
    how = {"pool_size": [kernel] * 2, "strides": [stride] * 2, "padding": [padding] * 2}
    batch, channels, size, _ = data
    out = (size + 2 * padding - kernel) // stride + 1

    def places(_rng, known):
        # PyTorch's forward pass saves the positions of the largest elements.
        x = torch.from_numpy(known[1])
        return F.max_pool2d(x, kernel, stride, padding, return_indices=True)[1].numpy()

    name = f"{batch}x{channels}x{size}², {kernel}x{kernel}, stride {stride}"
    return [
        Row(
            "memory",
            f"max_pool2d {name}",
            [data],
            lambda _, x: relax.op.nn.max_pool2d(x, **how),
            lambda x: F.max_pool2d(x, kernel, stride, padding),
        ),
        Row(
            "memory",
            f"max_pool2d, gradient {name}",
            [(batch, channels, out, out), data, places],
            lambda _, dy, x, _places: grad.max_pool2d_backward(dy, x, **how),
            lambda dy, x, places: aten.max_pool2d_with_indices_backward(
                dy, x, [kernel] * 2, [stride] * 2, [padding] * 2, [1, 1], False, places
            ),
        ),
    ]


def _avg_pool(data: tuple[int, ...], kernel: int, stride: int) -> list[Row]:
    how = {"pool_size": [kernel] * 2, "strides": [stride] * 2}
    batch, channels, size, _ = data
    out = (size - kernel) // stride + 1

    name = f"{batch}x{channels}x{size}², {kernel}x{kernel}, stride {stride}"
    return [
        Row(
            "memory",
            f"avg_pool2d {name}",
            [data],
            lambda _, x: relax.op.nn.avg_pool2d(x, **how),
            lambda x: F.avg_pool2d(x, kernel, stride),
        ),
        Row(
            "memory",
            f"avg_pool2d, gradient {name}",
            [(batch, channels, out, out), data],
            lambda _, dy, x: grad.avg_pool2d_backward(dy, x, **how),
            lambda dy, x: aten.avg_pool2d_backward(
                dy, x, [kernel] * 2, [stride] * 2, [0, 0], False, True, None
            ),
        ),
    ]


ROWS = [
    *_max_pool((8, 64, 112, 112), 3, 2, 1),
    *_max_pool((64, 32, 32, 32), 2, 2, 0),
    *_avg_pool((8, 64, 56, 56), 2, 2),
    *_avg_pool((8, 64, 56, 56), 3, 2),
]
