"""Small networks of PyTorch for pages and microcontrollers, with their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Small:
    """A network with cross-entropy.

    Attributes
    ----------
    name : str
        Its name in files.
    title : str
        Its name on pages.
    network : Callable[[], nn.Module]
        Makes it.
    shape : tuple[int, ...]
        The shape of its input, batch first.
    classes : int
        The number of classes.
    tokens : int
        The number of tokens, for an input of integers; 0 for numbers.
    """

    name: str
    title: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    tokens: int = 0

    def made(self) -> nn.Module:
        """Return the network in training mode, the same for each call."""
        torch.manual_seed(0)
        return self.network().train()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, the same for each call."""
        generator = torch.Generator().manual_seed(1)
        rows = self.shape if self.tokens else self.shape[:1]
        targets = torch.randint(0, self.classes, rows, generator=generator)
        if self.tokens:
            return torch.randint(0, self.tokens, self.shape, generator=generator), targets
        return torch.rand(self.shape, generator=generator), targets


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of classes on the last axis."""
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def digits() -> nn.Module:
    """The network of examples/digits_trainer.py."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 16, 10)),
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 64, 10)),
    )


def _separable(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """Return a depthwise and a pointwise convolution, with batch norm."""
    return [
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        *(nn.BatchNorm2d(inputs), nn.ReLU()),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        *(nn.BatchNorm2d(outputs), nn.ReLU()),
    ]


def mobilenet() -> nn.Module:
    """Depthwise separable convolutions as in MobileNet, for images of 32 x 32."""
    widths = ((16, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(layer for width in widths for layer in _separable(*width)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    )


def keywords() -> nn.Module:
    """DS-CNN of Zhang et al., "Hello Edge: Keyword Spotting on Microcontrollers", 2017, the small
    one: 10 coefficients of 49 frames, 12 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 64, (10, 4), (2, 2), (4, 1), bias=False),
        *(nn.BatchNorm2d(64), nn.ReLU()),
        *(layer for _ in range(4) for layer in _separable(64, 64)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12)),
    )


class Layer(nn.Module):
    """A layer of a transformer with causal attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self, tokens: int, length: int, width: int, heads: int, depth: int):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens) + self.position)))


def transformer() -> nn.Module:
    return Transformer(64, 32, 64, 4, 2)


#: The networks of docs/web_speed.md.
PAGES = (
    Small("mlp", "MLP, 784-128-10", mlp, (64, 784), 10),
    Small("digits", "digits CNN, 8 x 8", digits, (32, 1, 8, 8), 10),
    Small("convolutions", "3 convolutions, 32 x 32", convolutions, (32, 3, 32, 32), 10),
    Small("transformer", "transformer, 2 layers of 64", transformer, (16, 32), 64, 64),
    Small("mobilenet", "MobileNet-like, 32 x 32", mobilenet, (16, 3, 32, 32), 10),
)
