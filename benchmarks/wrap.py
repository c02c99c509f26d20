"""Time of a gradient through wrapped modules of PyTorch, for docs/pytorch.md.

Forward and backward run without an optimizer, in turn:

- ``own``: one compiled function that returns the loss and all gradients, called with tensors of
  TVM;
- ``within``: a wrapped module that returns the loss, and ``backward``;
- ``outside``: a wrapped module, PyTorch's loss after it, and ``backward``;
- ``torch``: PyTorch without compilation.

Every column after the first gives the median ratio to ``own`` of paired samples, and the ratio of
the least times. Each row runs in a process of its own, with PyTorch before the first wrapped
module: from then on, its threads sleep between its operations.
"""

from __future__ import annotations

import copy
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence

import numpy as np
import torch
import tvm
from _benchmark import Benchmark, facts, in_process
from _models import GPT, MLP
from _paired import digits, median_ratio
from _timing import measure
from torch import nn
from tvm import relax

import relax_grad
from relax_grad.frontend.torch import from_module, wrap

#: The largest difference from PyTorch, relative to the largest element.
TOLERANCE = 1e-4


def networks() -> dict[str, tuple]:
    """Return a constructor, the shape of the inputs and the number of classes, by name; an int is a
    number of tokens."""

    class Words(GPT):
        forward = GPT.scores

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

        def forward(self, x):
            return self.head(self.cells(x)[0][:, -1])

    class Dense(MLP):
        forward = MLP.scores

    def convolutional():
        layers, inputs = [], 3
        for filters in (16, 32, 64):
            layers += [nn.Conv2d(inputs, filters, 3, padding=1), nn.BatchNorm2d(filters)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            inputs = filters
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))

    return {
        "MLP 784-256-10, batch 64": (lambda: Dense(784, 256, 10), (64, 784), 10),
        "MLP 784-1024-1024-10, batch 128": (lambda: Dense(784, 1024, 1024, 10), (128, 784), 10),
        "CNN with BatchNorm, 64x3x32x32": (convolutional, (64, 3, 32, 32), 10),
        "GPT, 2 layers, 96 wide, 4x64": (lambda: Words(512, 64, 96, 2), 512, 512),
        "LSTM, 32x32x64, 128 wide": (Recurrent, (32, 32, 64), 10),
    }


def contestants(
    names: Sequence[str], build: Callable, shape, classes: int
) -> dict[str, Callable[[], object]]:
    """Return ``own`` and other functions to measure, by name; each returns the loss and the
    gradients."""
    torch.manual_seed(0)
    plain = build()
    if isinstance(shape, int):
        x = torch.randint(0, shape, (4, 64))
        labels = torch.randint(0, classes, (256,))
    else:
        x, labels = torch.randn(shape), torch.randint(0, classes, shape[:1])
    loss_of = nn.functional.cross_entropy

    class Loss(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x, labels):
            return loss_of(self.body(x), labels)

    imported = from_module(plain, (x,), loss=loss_of, targets=(labels,))
    module = relax_grad.value_and_grad(imported.module, "loss", wrt=list(imported.params))
    built = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    step = relax.VirtualMachine(built, tvm.cpu())["loss_adjoint"]
    arguments = [tvm.runtime.from_dlpack(tensor) for tensor in (torch.tensor(0), x, labels)]
    arguments += imported.values

    def own():
        (loss, _, _), gradients = step(*arguments)
        return loss, list(gradients)

    def of(module, call):
        params = list(module.parameters())

        def run():
            for param in params:
                param.grad = None
            loss = call()
            loss.backward()
            return loss, [param.grad for param in params]

        return run

    whole = wrap(Loss(copy.deepcopy(plain)), (x, labels))
    body = wrap(copy.deepcopy(plain), (x,))
    ways = {
        "own": own,
        "torch": of(plain, lambda: loss_of(plain(x), labels)),
        "within": of(whole, lambda: whole(x, labels)),
        "outside": of(body, lambda: loss_of(body(x), labels)),
    }
    return {"own": own, **{name: ways[name] for name in names}}


def compare(functions: dict[str, Callable]) -> None:
    """Raise an error if the losses or the gradients of the contestants differ."""
    results = {}
    for name, function in functions.items():
        loss, gradients = function()
        loss = loss if isinstance(loss, tvm.runtime.Tensor) else loss.detach()
        results[name] = np.concatenate(
            [np.from_dlpack(tensor).ravel() for tensor in (loss, *gradients)]
        )
    reference = list(results)[-1]
    for name, values in results.items():
        error = np.abs(values - results[reference]).max() / np.abs(results[reference]).max()
        if error > TOLERANCE:
            raise ValueError(f"{name} differs from {reference} by {error}")


def measured(row: tuple, args: Namespace) -> dict:
    """Return the time of ``own``, and for each other way the ratio to it and that of the least
    times.

    PyTorch is measured before the first module of this row is wrapped.
    """
    found: dict = {}
    for others in (["torch"], ["within", "outside"]):
        functions = contestants(others, *row)
        compare(functions)
        threads = facts("threads")["threads"]
        samples = measure(functions, args.repeats, args.seconds, threads=threads)
        own = samples["own"]
        found["own_us"] = round(statistics.median(own) * 1e6)
        for name in others:
            ratios = [median_ratio(samples[name], own), digits(min(samples[name]) / min(own))]
            found[name] = ratios
    return found


def in_own_process(name: str, args: Namespace) -> dict:
    """Return the figures of a row: PyTorch's threads sleep between its operations in a process that
    has wrapped a module."""
    return in_process("wrap", "_of", name, args.repeats, args.seconds)


def _of(name: str, repeats: int, seconds: float) -> dict:
    return measured(networks()[name], Namespace(repeats=repeats, seconds=seconds))


BENCHMARK = Benchmark(
    rows=lambda args: {name: name for name in networks()},
    measure=in_own_process,
    repeats=41,
    seconds=40.0,
)
