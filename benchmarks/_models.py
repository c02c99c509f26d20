"""The networks of the measured training steps. Each takes its inputs and the targets, and returns
the loss."""

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

    def scores(self, images):
        return self.head(self.features(images).mean((2, 3)))

    def forward(self, images, labels):
        return F.cross_entropy(self.scores(images), labels)


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


def resnet50(classes: int = 1000) -> nn.Module:
    def block(inputs: int, width: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            *(_conv(inputs, width, 1), nn.ReLU()),
            *(_conv(width, width, 3, stride), nn.ReLU()),
            _conv(width, 4 * width, 1),
        )
        is_plain = stride == 1 and inputs == 4 * width
        return _Residual(body, None if is_plain else _conv(inputs, 4 * width, 1, stride))

    layers, inputs = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(count):
            layers.append(block(inputs, width, 2 if i == 0 and width > 64 else 1))
            inputs = 4 * width
    return _Classifier(nn.Sequential(*layers), inputs, classes)


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

    def __init__(
        self, words: int = 8192, length: int = 256, width: int = 384, depth: int = 6, heads: int = 6
    ):
        super().__init__()
        self.words, self.places = (
            nn.Embedding(words, width),
            nn.Parameter(torch.zeros(length, width)),
        )
        self.blocks = nn.Sequential(*(_Transformer(width, heads, True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def scores(self, tokens):
        x = self.norm(self.blocks(self.words(tokens) + self.places))
        return self.head(x).flatten(0, 1)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.scores(tokens), targets.flatten())


class ViT(nn.Module):
    """A vision transformer; the class is read from the mean of the patches."""

    def __init__(self, size: int = 224, width: int = 192, depth: int = 12, classes: int = 1000):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros((size // 16) ** 2, width))
        self.blocks = nn.Sequential(*(_Transformer(width, 3, False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def scores(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))

    def forward(self, images, labels):
        return F.cross_entropy(self.scores(images), labels)


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, *widths: int):
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def scores(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)

    def forward(self, x, labels):
        return F.cross_entropy(self.scores(x), labels)


class UNet(nn.Module):
    """A U-Net that labels each pixel; transposed convolutions double the extents on the way up."""

    def __init__(self, width: int = 24, depth: int = 3, classes: int = 4):
        super().__init__()

        def twice(inputs, filters):
            return nn.Sequential(
                _conv(inputs, filters), nn.ReLU(), _conv(filters, filters), nn.ReLU()
            )

        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(map(twice, [3, *widths], widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * filters, filters, 2, 2) for filters in widths[:-1]
        )
        self.join = nn.ModuleList(twice(2 * filters, filters) for filters in widths[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images, labels):
        x, skipped = images, []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skipped.append(x)
        for skip, up, join in zip(skipped[-2::-1], self.up[::-1], self.join[::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return F.cross_entropy(self.head(x), labels)


class _ConvNeXtBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x):
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(classes: int = 1000) -> nn.Module:
    """Return a ConvNeXt of half of the width of ConvNeXt-T."""
    inputs, layers = 3, []
    for width, count in ((48, 3), (96, 3), (192, 9), (384, 3)):
        stride = 4 if inputs == 3 else 2
        layers.append(nn.Conv2d(inputs, width, stride, stride))
        layers.extend(_ConvNeXtBlock(width) for _ in range(count))
        inputs = width
    return _Classifier(nn.Sequential(*layers), inputs, classes)


class _LlamaBlock(nn.Module):
    """Rotary positions, grouped queries, root mean square norms and a gated layer, as in Llama."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int):
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k = nn.Linear(width, width, False), nn.Linear(width, groups * size, False)
        self.v, self.out = nn.Linear(width, groups * size, False), nn.Linear(width, width, False)
        self.gate, self.up = nn.Linear(width, hidden, False), nn.Linear(width, hidden, False)
        self.down = nn.Linear(hidden, width, False)

    def forward(self, x, cosines, sines):
        batch, length, width = x.shape

        def heads(linear, y, count):
            return linear(y).view(batch, length, count, width // self.heads).transpose(1, 2)

        def turned(y):
            left, right = y.chunk(2, -1)
            return y * cosines + torch.cat([-right, left], -1) * sines

        y = self.norms[0](x)
        q = turned(heads(self.q, y, self.heads))
        k, v = turned(heads(self.k, y, self.groups)), heads(self.v, y, self.groups)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder in the style of Llama."""

    def __init__(self, words: int = 4096, length: int = 256, width: int = 384, depth: int = 4):
        super().__init__()
        heads, groups = 6, 2
        angles = torch.outer(
            torch.arange(length), 1e4 ** -(torch.arange(0, 1, 2 * heads / width))
        ).repeat(1, 2)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            _LlamaBlock(width, heads, groups, 8 * width // 3) for _ in range(depth)
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens, targets):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Recurrent(nn.Module):
    """A recurrent layer for sequences, steps first, and a linear layer on its last result."""

    def __init__(self, layer: nn.Module, classes: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, classes)

    def forward(self, steps, labels):
        return F.cross_entropy(self.head(self.layer(steps)[0][-1]), labels)


@dataclass(frozen=True)
class Step:
    """A whole training step: forward, backward, SGD."""

    name: str
    network: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    group: str = "step"


def _images(batch: int, size: int, classes: int):
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,)))


def _tokens(batch: int, length: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, words, (batch, length)), torch.randint(0, words, (batch, length))


STEPS = [
    Step("ResNet-9, 64x3x32x32", resnet9, _images(64, 32, 10)),
    Step("ResNet-18, 8x3x224x224", resnet18, _images(8, 224, 1000)),
    Step("MobileNetV2, 8x3x224x224", mobilenet_v2, _images(8, 224, 1000)),
    Step("GPT, 6 layers, 384 wide, 4x256", GPT, lambda: _tokens(4, 256, 8192)),
    Step("ViT-tiny, 8x3x224x224", ViT, _images(8, 224, 1000)),
    Step(
        "GPT, 4 layers, 256 wide, 1x1024",
        lambda: GPT(2048, 1024, 256, 4, 4),
        lambda: _tokens(1, 1024, 2048),
    ),
    Step("Llama, 4 layers, 384 wide, 4x256", Llama, lambda: _tokens(4, 256, 4096)),
    Step(
        "MLP 784-1024-1024-10, batch 128",
        lambda: MLP(784, 1024, 1024, 10),
        lambda: (torch.randn(128, 784), torch.randint(0, 10, (128,))),
    ),
    Step(
        "U-Net, 4x3x128x128",
        UNet,
        lambda: (torch.randn(4, 3, 128, 128), torch.randint(0, 4, (4, 128, 128))),
    ),
    Step("ConvNeXt, 4x3x128x128", convnext, _images(4, 128, 1000)),
    *(
        Step(
            f"{kind} 128 -> 256, 32 steps, batch 32",
            lambda kind=kind: Recurrent(getattr(nn, kind)(128, 256), 10),
            lambda: (torch.randn(32, 32, 128), torch.randint(0, 10, (32,))),
        )
        for kind in ("LSTM", "GRU", "RNN")
    ),
]
