"""The time of a gradient through wrapped modules of PyTorch.

``python benchmarks/wrap.py`` measures forward and backward, without an optimizer, in turn:

- ``own``: one compiled function that returns the loss and all gradients, called with tensors of
  TVM;
- ``within``: a wrapped module that returns the loss, and ``backward``;
- ``outside``: a wrapped module with PyTorch's loss behind it, and ``backward``;
- ``torch``: PyTorch without compilation.

Every column after the first two gives the median ratio to ``own`` of paired samples, and in
brackets that of the least times. PyTorch is measured before the first module is wrapped: from then
on, its threads sleep between its operations.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Sequence

import numpy as np

THREADS = 2

#: The largest difference from PyTorch, relative to the largest element.
TOLERANCE = 1e-4


def networks(nn) -> dict[str, tuple]:
    """Return a constructor, the shape of the inputs and the number of classes, by name; an int is a
    number of tokens."""
    from _models import GPT

    class Words(GPT):
        def forward(self, tokens):
            x = self.norm(self.blocks(self.words(tokens) + self.places))
            return self.head(x).flatten(0, 1)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

        def forward(self, x):
            return self.head(self.cells(x)[0][:, -1])

    def dense(*widths):
        layers = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return lambda: nn.Sequential(*layers[:-1])

    def convolutional():
        layers, inputs = [], 3
        for filters in (16, 32, 64):
            layers += [nn.Conv2d(inputs, filters, 3, padding=1), nn.BatchNorm2d(filters)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            inputs = filters
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))

    return {
        "MLP 784-256-10, batch 64": (dense(784, 256, 10), (64, 784), 10),
        "MLP 784-1024-1024-10, batch 128": (dense(784, 1024, 1024, 10), (128, 784), 10),
        "CNN with BatchNorm, 64x3x32x32": (convolutional, (64, 3, 32, 32), 10),
        "GPT, 2 layers, 96 wide, 4x64": (lambda: Words(512, 64, 96, 2), 512, 512),
        "LSTM, 32x32x64, 128 wide": (Recurrent, (32, 32, 64), 10),
    }


def contestants(
    names: Sequence[str], build: Callable, shape, classes: int
) -> dict[str, Callable[[], object]]:
    """Return ``own`` and other functions to measure, by name; each returns the loss and the
    gradients."""
    import torch
    import tvm
    from torch import nn
    from tvm import relax

    import relax_grad
    from relax_grad.frontend.torch import from_module, wrap

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

    import copy

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
    import tvm

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="a part of the name of the rows")
    parser.add_argument("--repeats", type=int, default=41, help="samples of each (default: 41)")
    parser.add_argument("--seconds", type=float, default=40.0, help="stop a row after this time")
    parser.add_argument("--threads", type=int, default=THREADS, help="of each (default: 2)")
    arguments = parser.parse_args()
    for variable in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[variable] = str(arguments.threads)
    import torch
    from _timing import measure, raise_mmap_threshold

    torch.set_num_threads(arguments.threads)
    raise_mmap_threshold()
    chosen = {k: v for k, v in networks(torch.nn).items() if arguments.only in k}

    def measured(name: str, others: Sequence[str]) -> dict[str, list[float]]:
        functions = contestants(others, *chosen[name])
        compare(functions)
        return measure(functions, arguments.repeats, arguments.seconds, threads=arguments.threads)

    plain = {name: measured(name, ["torch"]) for name in chosen}
    print(f"{'network':<34}{'own us':>9}{'within':>15}{'outside':>15}{'torch':>15}")
    for name in chosen:
        samples = measured(name, ["within", "outside"])
        line = f"{name:<34}{statistics.median(samples['own']) * 1e6:>9.0f}"
        for times, column in ((samples, "within"), (samples, "outside"), (plain[name], "torch")):
            pairs = zip(times[column], times["own"], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            least = min(times[column]) / min(times["own"])
            line += f"{ratio:>8.2f} ({least:.2f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
