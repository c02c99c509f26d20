"""Deep networks whose training steps have many operators, for the measurement of compile times."""

from __future__ import annotations

import torch
from _models import _Classifier, _conv, _Residual
from torch import nn
from torch.nn import functional as F


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


class _ShuffleBlock(nn.Module):
    """Two branches whose channels are interleaved; a stride of one passes half of them on."""

    def __init__(self, inputs: int, filters: int, stride: int):
        super().__init__()
        half = filters // 2
        taken = inputs if stride > 1 else half
        self.passed = stride == 1
        self.left = (
            nn.Identity()
            if self.passed
            else nn.Sequential(
                _conv(inputs, inputs, 3, stride, inputs), _conv(inputs, half, 1), nn.ReLU()
            )
        )
        self.right = nn.Sequential(
            *(_conv(taken, half, 1), nn.ReLU()),
            _conv(half, half, 3, stride, half),
            *(_conv(half, half, 1), nn.ReLU()),
        )

    def forward(self, x):
        left, right = x.chunk(2, 1) if self.passed else (x, x)
        y = torch.cat([self.left(left), self.right(right)], 1)
        batch, channels, rows, columns = y.shape
        y = y.view(batch, 2, channels // 2, rows, columns).transpose(1, 2)
        return y.reshape(batch, channels, rows, columns)


def shufflenet_v2(classes: int = 1000) -> nn.Module:
    """Return ShuffleNetV2 of width 1.0."""
    layers, inputs = [_conv(3, 24, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 24
    for filters, count in ((116, 4), (232, 8), (464, 4)):
        for i in range(count):
            layers.append(_ShuffleBlock(inputs, filters, 2 if i == 0 else 1))
            inputs = filters
    layers += [_conv(inputs, 1024, 1), nn.ReLU()]
    return _Classifier(nn.Sequential(*layers), 1024, classes)


class _SqueezeExcite(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)

    def forward(self, x):
        y = F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))
        return x * torch.sigmoid(self.up(y))


def efficientnet_b0(classes: int = 1000) -> nn.Module:
    """Return EfficientNet-B0 without stochastic depth."""

    def block(inputs: int, filters: int, kernel: int, stride: int, factor: int) -> nn.Module:
        width = inputs * factor
        body = nn.Sequential(
            *([_conv(inputs, width, 1), nn.SiLU()] if factor > 1 else []),
            *(_conv(width, width, kernel, stride, width), nn.SiLU()),
            _SqueezeExcite(width, max(1, inputs // 4)),
            _conv(width, filters, 1),
        )
        return _Residual(body, last=False) if stride == 1 and inputs == filters else body

    layers, inputs = [_conv(3, 32, 3, 2), nn.SiLU()], 32
    for factor, kernel, filters, count, stride in [
        (1, 3, 16, 1, 1),
        (6, 3, 24, 2, 2),
        (6, 5, 40, 2, 2),
        (6, 3, 80, 3, 2),
        (6, 5, 112, 3, 1),
        (6, 5, 192, 4, 2),
        (6, 3, 320, 1, 1),
    ]:
        for i in range(count):
            layers.append(block(inputs, filters, kernel, stride if i == 0 else 1, factor))
            inputs = filters
    layers += [_conv(inputs, 1280, 1), nn.SiLU()]
    return _Classifier(nn.Sequential(*layers), 1280, classes)


class _DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(inputs), nn.BatchNorm2d(4 * growth)])
        self.reduce = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.grow = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.reduce(F.relu(self.norms[0](x)))
        return torch.cat([x, self.grow(F.relu(self.norms[1](y)))], 1)


def densenet121(classes: int = 1000, growth: int = 32) -> nn.Module:
    layers, inputs = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for count in (6, 12, 24, 16):
        if inputs > 64:
            layers += [nn.BatchNorm2d(inputs), nn.ReLU()]
            layers += [nn.Conv2d(inputs, inputs // 2, 1, bias=False), nn.AvgPool2d(2)]
            inputs //= 2
        for _ in range(count):
            layers.append(_DenseLayer(inputs, growth))
            inputs += growth
    layers += [nn.BatchNorm2d(inputs), nn.ReLU()]
    return _Classifier(nn.Sequential(*layers), inputs, classes)
