"""Activations and their gradients, for tensors as wide as GPT-2's hidden layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F
from tvm import relax

from ._form import Row

aten = torch.ops.aten

_HIDDEN = (4, 256, 3072)


def _rows(name: str, in_relax: Callable, in_torch: Callable, backward: Callable) -> list[Row]:
    """Return the rows of an activation and of its gradient; ``backward`` takes the output gradient
    and the input."""

    def forward(_, x):
        return in_relax(x)

    return [
        Row("memory", f"{name} 4x256x3072", [_HIDDEN], forward, in_torch),
        Row(
            "memory",
            f"{name}, gradient 4x256x3072",
            [_HIDDEN, _HIDDEN],
            forward,
            lambda x, dy: backward(dy, x),
            wrt=(0,),
        ),
    ]


ROWS = [
    *_rows("gelu", relax.op.nn.gelu, F.gelu, aten.gelu_backward),
    *_rows(
        "gelu by tanh",
        relax.op.nn.gelu_tanh,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    *_rows("silu", relax.op.nn.silu, F.silu, aten.silu_backward),
    *_rows("relu", relax.op.nn.relu, torch.relu, lambda dy, x: aten.threshold_backward(dy, x, 0)),
]
