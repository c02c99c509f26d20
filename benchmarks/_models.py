"""The networks of the measured training steps. Each takes its inputs and the targets, and returns the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


def _conv(inputs: int, filters: int, kernel: int = 3, stride: int = 1, groups: int = 1):
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, filters, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(filters),
    )


class _Classifier(nn.Module):
    """A feature extractor for images, and a linear layer on the mean of the features."""

    def __init__(self, features: nn.Module, width: int, classes: int):
        super().__init__()
        self.features, self.head = features, nn.Linear(width, classes)

    def forward(self, images, labels):
        return F.cross_entropy(self.head(self.features(images).mean((2, 3))), labels)


class _Residual(nn.Module):
    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, last: bool = True):
        super().__init__()
        self.body, self.shortcut, self.last = body, shortcut or nn.Identity(), last

    def forward(self, x):
        y = self.body(x) + self.shortcut(x)
        return F.relu(y) if self.last else y


def resnet9(classes: int = 10, width: int = 16) -> nn.Module:
    """Return ResNet-9 in the size of the demo."""

    def layer(inputs, filters, pool=False):
        pooling = [nn.MaxPool2d(2)] if pool else []
        return nn.Sequential(_conv(inputs, filters), nn.ReLU(), *pooling)

    def residual(filters):
        return _Residual(
            nn.Sequential(layer(filters, filters), layer(filters, filters)), last=False
        )

    return _Classifier(
        nn.Sequential(
            layer(3, width),
            layer(width, 2 * width, True),
            residual(2 * width),
            layer(2 * width, 4 * width, True),
            layer(4 * width, 8 * width, True),
            residual(8 * width),
        ),
        8 * width,
        classes,
    )


def resnet18(classes: int = 1000) -> nn.Module:
    def block(inputs, filters, stride):
        body = nn.Sequential(
            _conv(inputs, filters, 3, stride), nn.ReLU(), _conv(filters, filters, 3)
        )
        is_plain = stride == 1 and inputs == filters
        return _Residual(body, None if is_plain else _conv(inputs, filters, 1, stride))

    layers, inputs = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for filters in (64, 128, 256, 512):
        for i in range(2):
            layers.append(block(inputs, filters, 2 if i == 0 and filters > 64 else 1))
            inputs = filters
    return _Classifier(nn.Sequential(*layers), 512, classes)


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    def block(inputs, filters, stride, factor):
        width = inputs * factor
        body = nn.Sequential(
            *([_conv(inputs, width, 1), nn.ReLU6()] if factor > 1 else []),
            _conv(width, width, 3, stride, width),
            nn.ReLU6(),
            _conv(width, filters, 1),
        )
        return _Residual(body, last=False) if stride == 1 and inputs == filters else body

    layers, inputs = [_conv(3, 32, 3, 2), nn.ReLU6()], 32
    for factor, filters, count, stride in [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]:
        for i in range(count):
            layers.append(block(inputs, filters, stride if i == 0 else 1, factor))
            inputs = filters
    return _Classifier(nn.Sequential(*layers, _conv(320, 1280, 1), nn.ReLU6()), 1280, classes)


class _Transformer(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).split(width, -1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A decoder in the style of GPT-2."""

    def __init__(self, words: int = 8192, length: int = 256, width: int = 384, depth: int = 6):
        super().__init__()
        self.words, self.places = (
            nn.Embedding(words, width),
            nn.Parameter(torch.zeros(length, width)),
        )
        self.blocks = nn.Sequential(*(_Transformer(width, 6, True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens, targets):
        x = self.norm(self.blocks(self.words(tokens) + self.places))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """A vision transformer; the class is read from the mean of the patches."""

    def __init__(self, size: int = 224, width: int = 192, depth: int = 12, classes: int = 1000):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros((size // 16) ** 2, width))
        self.blocks = nn.Sequential(*(_Transformer(width, 3, False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images, labels):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return F.cross_entropy(self.head(self.norm(self.blocks(x)).mean(1)), labels)


@dataclass(frozen=True)
class Step:
    """A whole training step: forward, backward, SGD."""

    name: str
    network: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    group: str = "step"


def _images(batch: int, size: int, classes: int):
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,)))


STEPS = [
    Step("ResNet-9, 64x3x32x32", resnet9, _images(64, 32, 10)),
    Step("ResNet-18, 8x3x224x224", resnet18, _images(8, 224, 1000)),
    Step("MobileNetV2, 8x3x224x224", mobilenet_v2, _images(8, 224, 1000)),
    Step(
        "GPT, 6 layers, 384 wide, 4x256",
        GPT,
        lambda: (torch.randint(0, 8192, (4, 256)), torch.randint(0, 8192, (4, 256))),
    ),
    Step("ViT-tiny, 8x3x224x224", ViT, _images(8, 224, 1000)),
]
