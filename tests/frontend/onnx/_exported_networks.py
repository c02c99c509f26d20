"""Networks that PyTorch's exporters write with symbolic sizes: small forms of well-known ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

F = nn.functional


class Network(NamedTuple):
    """A module, the shapes of its input, of which the first is exported, and the symbols of its
    axes."""

    make: Callable[[], nn.Module]
    shapes: tuple
    axes: dict[int, str]
    takes_words: bool = False


class Inverted(nn.Module):
    """An inverted residual with a squeezed excitation, as in MobileNetV3."""

    def __init__(self, width=4, inner=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1), nn.Hardswish(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner), nn.Hardswish(),
        )  # fmt: skip
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, 2, 1), nn.ReLU(), nn.Conv2d(2, inner, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.last = nn.Conv2d(inner, width, 1)

    def forward(self, x):
        y = self.body(x)
        return x + self.last(y * self.squeeze(y))


def mobile_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.Hardswish(), Inverted(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


class Llama(nn.Module):
    """A decoder with normalised roots, rotary positions, grouped queries and gated layers."""

    def __init__(self, words=20, width=8, heads=2):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.first, self.second = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.pair = nn.Linear(width, 2 * self.size, bias=False)
        self.gate, self.up = (nn.Linear(width, 12, bias=False) for _ in range(2))
        self.down = nn.Linear(12, width, bias=False)
        self.register_buffer("inv_freq", 100.0 ** -(torch.arange(0, self.size, 2) / self.size))

    @staticmethod
    def norm(x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale

    def turned(self, x):
        angles = torch.arange(x.shape[2]).to(x.dtype)[:, None] * self.inv_freq.to(x.dtype)
        angles = torch.cat([angles, angles], -1)
        first, other = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-other, first], -1) * angles.sin()

    def forward(self, ids):
        x = self.words(ids)
        batch, steps, width = x.shape
        y = self.norm(x, self.first)
        q = self.query(y).view(batch, steps, self.heads, self.size).transpose(1, 2)
        k, v = (head.unsqueeze(1) for head in self.pair(y).chunk(2, -1))
        k, v = (head.expand(-1, self.heads, -1, -1) for head in (self.turned(k), v))
        scores = self.turned(q) @ k.transpose(2, 3) / self.size**0.5
        later = torch.full((steps, steps), -1e9, dtype=x.dtype).triu(1)
        y = ((scores + later).softmax(-1) @ v).transpose(1, 2).reshape(batch, steps, width)
        x = x + self.out(y)
        y = self.norm(x, self.second)
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class VisionTransformer(nn.Module):
    """Patches, a token of the class, and positions that are resized to the picture."""

    def __init__(self, width=8, grid=3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, width, grid, grid))
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x):
        x = self.patches(x)
        x = x + F.interpolate(self.pos_embed, size=x.shape[2:], mode="bilinear")
        x = torch.cat(
            [self.cls_token.expand(x.shape[0], -1, -1), x.flatten(2).transpose(-2, -1)], 1
        )
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2)
                   for part in self.qkv(self.norm(x)).chunk(3, -1))  # fmt: skip
        y = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        return self.mlp(x + y.transpose(1, 2).flatten(2))[:, 0]


class Conformer(nn.Module):
    """A gated convolution over time with a normalisation of batches, as in speech recognition."""

    def __init__(self, width=6):
        super().__init__()
        self.front = nn.Conv1d(4, width, 3, 2, 1)
        self.norm, self.gate = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.depth = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.batch_norm, self.last = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)
        self.rnn = nn.LSTM(width, 5, batch_first=True, bidirectional=True)

    def forward(self, x):
        x = self.front(x).transpose(-2, -1)
        y = F.glu(self.gate(self.norm(x).transpose(-2, -1)), 1)
        x = x + self.last(F.silu(self.batch_norm(self.depth(y)))).transpose(-2, -1)
        return self.rnn(x)[0].log_softmax(-1)


class Points(nn.Module):
    """The largest features of a cloud of points, and features of the distances between them."""

    def __init__(self):
        super().__init__()
        self.lifted = nn.Sequential(nn.Linear(3, 8), nn.PReLU(), nn.Linear(8, 6))
        self.near, self.head = nn.Linear(6, 6), nn.Linear(12, 3)

    def forward(self, x):
        y = self.lifted(x)
        square = (x.unsqueeze(2) - x.unsqueeze(1)).square().sum(-1)
        weights = torch.softmax(-square, -1)
        z = torch.tanh(self.near(weights @ y))
        return self.head(torch.cat([y.amax(1), z.mean(1)], -1))


IMAGE = {0: "batch", 2: "height", 3: "width"}
STEPS = {0: "batch", 1: "steps"}

NETWORKS = {
    "mobile_net": Network(mobile_net, ((2, 3, 8, 10), (1, 3, 13, 6)), IMAGE),
    "llama": Network(Llama, ((2, 7), (3, 5)), STEPS, True),
    "vision_transformer": Network(VisionTransformer, ((2, 3, 8, 10), (1, 3, 6, 8)), IMAGE),
    "conformer": Network(Conformer, ((2, 4, 11), (3, 4, 8)), {0: "batch", 2: "steps"}),
    "points": Network(Points, ((2, 7, 3), (3, 5, 3)), {0: "batch", 1: "points"}),
}


def module_of(network: Network, dtype=torch.float64) -> nn.Module:
    """Return the module in evaluation; no two of its weights are equal."""
    torch.manual_seed(0)
    module = network.make().to(dtype).eval()
    with torch.no_grad():  # equal weights, such as zeros, would be one parameter
        for param in module.parameters():
            param += 0.02 * torch.randn_like(param)
    return module


def drawn(network: Network, shape, dtype=torch.float64):
    return torch.randint(0, 20, shape) if network.takes_words else torch.randn(shape, dtype=dtype)


def export(module, x, axes, path, dynamo: bool) -> None:
    """Write the file of a module with symbolic axes."""
    options = {"input_names": ["x"], "output_names": ["y"], "dynamo": dynamo}
    if dynamo:
        options |= {"dynamic_shapes": (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),)}
        options |= {"verbose": False, "optimize": False}  # the names and layouts of weights stay
    else:
        training = torch.onnx.TrainingMode.PRESERVE
        options |= {"dynamic_axes": {"x": axes}, "do_constant_folding": False, "training": training}
        options |= {"opset_version": 17}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), str(path), **options)
