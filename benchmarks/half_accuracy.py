"""Errors of kernels in half precision beside PyTorch, for docs/accuracy.md."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import tvm
from _benchmark import Benchmark, facts, named
from torch import nn
from torch.nn import functional as F

from relax_grad.frontend.torch import wrap

DTYPES = ("bfloat16", "float16")

#: The draws of random numbers of a case: the error of one draw depends on luck.
_DRAWS = 3

_IMAGES = (4, 32, 28, 28)


@dataclass(frozen=True)
class Case:
    """A call of a kernel family.

    Attributes
    ----------
    function : Callable
        Takes tensors, and returns one.
    shapes : tuple
        The shapes of the tensors, which are normally distributed.
    scales : Mapping[int, float]
        The factors of some of them: weights are smaller than activations.
    """

    function: Callable
    shapes: tuple
    scales: Mapping[int, float] = field(default_factory=dict)


def _recurrent(kind: type[nn.RNNBase]) -> Case:
    inputs, hidden = 32, 48
    layer = kind(inputs, hidden, batch_first=True)
    names = list(layer.state_dict())
    shapes = [tuple(value.shape) for value in layer.state_dict().values()]

    def run(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))[0]

    scale = hidden**-0.5
    return Case(run, ((8, 16, inputs), *shapes), dict.fromkeys(range(1, len(shapes) + 1), scale))


def _attention(length: int, causal: bool) -> Case:
    shape = (2, 4, length, 32)
    return Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), (shape,) * 3
    )


def _loss(function: Callable) -> Case:
    classes = torch.arange(256) % 100
    return Case(lambda x: function(x, classes), ((256, 100),))


def _squared(x, y):
    return F.mse_loss(x, y)


#: The cases of each family of kernels.
CASES: dict[str, dict[str, Case]] = {
    "products": {
        "matmul, 128x512 by 512x96": Case(torch.matmul, ((128, 512), (512, 96))),
        "linear, 64x256 to 192": Case(F.linear, ((64, 256), (192, 256), (192,)), {1: 0.06}),
        "batch of products": Case(torch.matmul, ((8, 40, 72), (8, 72, 56))),
    },
    "convolutions": {
        "conv2d 3x3": Case(
            lambda x, w: F.conv2d(x, w, padding=1), (_IMAGES, (48, 32, 3, 3)), {1: 0.06}
        ),
        "conv2d 3x3 with a bias": Case(
            lambda x, w, b: F.conv2d(x, w, b, padding=1),
            (_IMAGES, (48, 32, 3, 3), (48,)),
            {1: 0.06},
        ),
        "conv2d 1x1": Case(F.conv2d, (_IMAGES, (48, 32, 1, 1)), {1: 0.18}),
        "conv2d 5x5, stride 2": Case(
            lambda x, w: F.conv2d(x, w, padding=2, stride=2), (_IMAGES, (48, 32, 5, 5)), {1: 0.04}
        ),
        "conv2d 3x3 of 3 channels": Case(
            lambda x, w: F.conv2d(x, w, padding=1), ((4, 3, 28, 28), (48, 3, 3, 3)), {1: 0.2}
        ),
        "conv3d 3x3x3": Case(
            lambda x, w: F.conv3d(x, w, padding=1),
            ((2, 16, 8, 12, 12), (24, 16, 3, 3, 3)),
            {1: 0.05},
        ),
        "conv_transpose2d 4x4, stride 2": Case(
            lambda x, w: F.conv_transpose2d(x, w, padding=1, stride=2),
            ((4, 32, 14, 14), (32, 24, 4, 4)),
            {1: 0.09},
        ),
        "depthwise 3x3": Case(
            lambda x, w: F.conv2d(x, w, padding=1, groups=32), (_IMAGES, (32, 1, 3, 3)), {1: 0.3}
        ),
    },
    "attention": {
        "128 keys": _attention(128, False),
        "512 keys": _attention(512, False),
        "512 keys, causal": _attention(512, True),
        "200 keys, grouped heads": Case(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            ((2, 8, 200, 32), (2, 2, 200, 32), (2, 2, 200, 32)),
        ),
    },
    "normalisation": {
        "layer_norm, 256x384": Case(
            lambda x, g, b: F.layer_norm(x, (384,), g, b), ((256, 384), (384,), (384,))
        ),
        "rms_norm, 256x384": Case(
            lambda x, g: F.rms_norm(x, (384,), g, 1e-5), ((256, 384), (384,))
        ),
        "batch_norm, 4x32x28²": Case(
            lambda x, g, b: F.batch_norm(x, None, None, g, b, training=True),
            (_IMAGES, (32,), (32,)),
        ),
    },
    "softmax": {
        "softmax, 256x500": Case(lambda x: x.softmax(-1), ((256, 500),)),
        "log_softmax, 256x500": Case(lambda x: x.log_softmax(-1), ((256, 500),)),
    },
    "recurrent": {
        "LSTM, 16 steps": _recurrent(nn.LSTM),
        "GRU, 16 steps": _recurrent(nn.GRU),
        "RNN, 16 steps": _recurrent(nn.RNN),
    },
    "reductions": {
        "sum of columns, 2000x64": Case(lambda x: x.sum(0), ((2000, 64),)),
        "mean of rows, 64x2000": Case(lambda x: x.mean(-1), ((64, 2000),)),
        "variance of rows, 64x2000": Case(lambda x: x.var(-1), ((64, 2000),)),
    },
    "pooling": {
        "avg_pool2d 2x2": Case(lambda x: F.avg_pool2d(x, 2), (_IMAGES,)),
        "max_pool2d 3x3, stride 2": Case(lambda x: F.max_pool2d(x, 3, 2, 1), (_IMAGES,)),
    },
    "activations": {
        "gelu, 256x384": Case(F.gelu, ((256, 384),)),
        "silu, 256x384": Case(F.silu, ((256, 384),)),
    },
    "indexing": {
        "embedding, 600 of 40 rows": Case(
            lambda x: F.embedding(torch.arange(600) % 40, x), ((40, 64),)
        )
    },
    "losses": {
        "cross_entropy, 256x100": _loss(F.cross_entropy),
        "mse_loss, 256x100": Case(_squared, ((256, 100), (256, 100))),
    },
}


class _Module(nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def measure(
    case: Case, dtype: str, target: tvm.target.Target | None = None
) -> dict[str, dict[str, float]]:
    """Return the errors of the result and of the gradients: ours, compiled for a target, and
    PyTorch's.

    An error is the largest difference of an element from float64 of the same numbers, relative to
    the largest element of the same tensor. That of the gradients is the largest of all of them.
    Each is the mean of several draws.
    """
    half = getattr(torch, dtype)
    errors: dict[str, list] = {"relax_grad": [], "torch": []}
    wrapped = None
    for seed in range(_DRAWS):
        generator = torch.Generator().manual_seed(seed)
        inputs = [
            (torch.randn(shape, generator=generator) * case.scales.get(i, 1.0)).to(half)
            for i, shape in enumerate(case.shapes)
        ]
        exact = [x.double() for x in inputs]
        grad = torch.randn(case.function(*exact).shape, generator=generator).to(half)
        wanted = _run(case.function, exact, grad.double())
        if wrapped is None:
            leaves = [x.clone().requires_grad_() for x in inputs]
            wrapped = wrap(_Module(case.function), leaves, target=target)
        for name, function in (("relax_grad", wrapped), ("torch", case.function)):
            errors[name].append(list(_errors(_run(function, inputs, grad), wanted)))
    means = {
        name: torch.tensor([[e[0], max(e[1:])] for e in draws]).mean(0).tolist()
        for name, draws in errors.items()
    }
    return {
        name: dict(zip(("result", "gradients"), mean, strict=True)) for name, mean in means.items()
    }


def _run(function: Callable, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


def _errors(tensors: list[torch.Tensor], wanted: list[torch.Tensor]) -> Iterator[float]:
    for tensor, exact in zip(tensors, wanted, strict=True):
        yield float((tensor.double() - exact).abs().max() / exact.abs().max())


def measured(family: str, args: Namespace) -> dict[str, dict]:
    """Return the errors of the cases of a family, by dtype, with two digits."""
    return {
        name: {dtype: _rounded(measure(case, dtype)) for dtype in DTYPES}
        for name, case in CASES[family].items()
    }


def _rounded(errors: dict) -> dict:
    return {
        library: {kind: float(f"{error:.1e}") for kind, error in own.items()}
        for library, own in errors.items()
    }


BENCHMARK = Benchmark(
    rows=lambda args: {family: family for family in CASES},
    measure=measured,
    json="half_accuracy.json",
    head=lambda args: {"about": facts("processor", "python", "tvm", "numpy", "torch")},
    layout=named("errors"),
)
