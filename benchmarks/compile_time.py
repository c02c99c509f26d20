"""Time until a step has run, in the first process of a script and in the next one.

Each network is imported with its loss, and its training step with AdamW compiled and run once, in
processes of their own: without a cache, with an empty one (first), with the cache that this process
has filled (next), and by ``torch.compile`` with an empty cache of its own. The networks are in
training mode. The figures are seconds of wall time of the import of the model, of the
differentiation, of the compilation, and of all of it with the first step, and the processor seconds
of all. The imports of TVM and PyTorch do not count.

``--phases`` adds the slowest passes. They run in one thread, and all functions are generated.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable

import _models
import _steps
import torch
import tvm
from _benchmark import Benchmark, in_process, named

import relax_grad
from relax_grad.frontend.torch import from_module
from relax_grad.training import AdamW, Trainer, train_step

_RESNET50 = _models.Step("ResNet-50, 4x3x224x224", _models.resnet50, _models._images(4, 224, 1000))
STEPS = {step.name: step for step in [*_models.STEPS, _RESNET50]}

WAYS = ("no cache", "first", "next", "torch.compile")


@tvm.instrument.pass_instrument
class _Phases:
    """Add up the time of each pass, without the passes that it runs."""

    def __init__(self):
        self.seconds, self._open = Counter(), []

    def run_before_pass(self, _module, _info):
        self._open.append([time.perf_counter(), 0.0])

    def run_after_pass(self, _module, info):
        start, within = self._open.pop()
        spent = time.perf_counter() - start
        self.seconds[info.name] += spent - within
        if self._open:
            self._open[-1][1] += spent


class _Clock:
    """The times between marks."""

    def __init__(self):
        self._start = self._last = time.perf_counter()
        self._used = time.process_time()
        self.parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self.parts[part], self._last = now - self._last, now

    def end(self) -> dict[str, float]:
        whole, used = time.perf_counter() - self._start, time.process_time() - self._used
        return {**self.parts, "all": whole, "processors": used}


def once(name: str, way: str, phases: bool) -> dict[str, float]:
    """Return the times of the parts until the first step has run, and those of passes."""
    relax_grad.set_num_threads()
    network, inputs = _steps.initial(STEPS[name])
    if way == "torch.compile":
        return _in_torch(network, inputs)
    instruments = [_Phases()] if phases else []
    clock = _Clock()
    imported = from_module(network, inputs)
    clock.mark("import")
    step = train_step(imported, AdamW(lr=1e-3))
    clock.mark("differentiate")
    with tvm.transform.PassContext(instruments=instruments):
        trainer = Trainer(step)
    clock.mark("compile")
    trainer.step(*inputs)
    slowest = instruments[0].seconds.most_common(12) if phases else []
    return clock.end() | dict(slowest)


def _in_torch(network: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the times of ``torch.compile``, with the optimizer outside of the compiled module.

    The processor seconds of its compilers, which are processes of their own, are unknown.
    """
    clock = _Clock()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    compiled: Callable = torch.compile(network)
    compiled(*inputs).backward()
    optimizer.step()
    clock.mark("compile")
    return {part: seconds for part, seconds in clock.end().items() if part != "processors"}


def measured(name: str, args: Namespace) -> dict:
    """Return the times of each way, in processes of their own whose caches are in a folder."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        places = {
            "RELAX_GRAD_CACHE": f"{folder}/relax_grad",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        for way in args.ways:
            variables = places | ({"RELAX_GRAD_CACHE": "0"} if way == "no cache" else {})
            arguments = "compile_time", "once", name, way, args.phases
            found[way] = in_process(*arguments, environment=variables)
    return found


BENCHMARK = Benchmark(
    rows=lambda args: {name: name for name in STEPS},
    measure=measured,
    json="compile_time.json",
    layout=named("steps"),
    options={
        "--phases": {"action": "store_true", "help": "the passes that take longest"},
        "--ways": {"nargs": "*", "default": WAYS, "choices": WAYS, "help": "default: all"},
    },
)
