"""The time until a training step has run, in the first process of a script and in the next one.

``python benchmarks/compile_time.py`` imports each network with its loss, makes a training step with
AdamW, compiles it and runs it once, in processes of their own: without a cache, with an empty one
(first), with the cache that this process has filled (next), and by ``torch.compile`` with an empty
cache of its own. The networks are in training mode. The table gives seconds of wall time for the
import of the model, for the differentiation, for the compilation, and for all of it with the first
step, and the processor seconds of all. The imports of TVM and PyTorch do not count.

``--phases`` adds the slowest passes. They run in one thread, and all functions are generated.
``--save FILE`` writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import _deep_models
import _models
import _steps
import torch
import tvm

import relax_grad
from relax_grad.frontend.torch import from_module
from relax_grad.training import AdamW, Trainer, train_step

STEPS = {
    step.name: step
    for step in [
        *_models.STEPS,
        *(
            _models.Step(f"{name}, 4x3x224x224", network, _models._images(4, 224, 1000))
            for name, network in {
                "ResNet-50": _deep_models.resnet50,
                "ShuffleNetV2": _deep_models.shufflenet_v2,
                "EfficientNet-B0": _deep_models.efficientnet_b0,
                "DenseNet-121": _deep_models.densenet121,
            }.items()
        ),
    ]
}

WAYS = ("no cache", "first", "next", "torch.compile")

_PARTS = ("import", "differentiate", "compile", "all", "processors")


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


def measure(name: str, way: str, phases: bool) -> dict:
    """Return the times of the parts until the first step has run, and those of passes."""
    network, inputs = _steps.initial(STEPS[name])
    if way == "torch.compile":
        return {**_in_torch(network, inputs), "phases": []}
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
    return {**clock.end(), "phases": slowest}


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


def _in_process(name: str, way: str, folder: str, phases: bool) -> dict:
    """Measure in a process of its own, whose caches are in a folder."""
    command = [sys.executable, __file__, "--one", name, way, *(["--phases"] if phases else [])]
    places = {
        "RELAX_GRAD_CACHE": "0" if way == "no cache" else f"{folder}/relax_grad",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }
    environment = {**os.environ, **places}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"the beginning of one of {'; '.join(STEPS)}"
    )
    parser.add_argument("--phases", action="store_true", help="the passes that take longest")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS, help="default: all")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        relax_grad.set_num_threads()
        print(json.dumps(measure(*arguments.one, arguments.phases)))
        return
    chosen = [name for name in STEPS if name.startswith(tuple(arguments.names or [""]))]
    if not chosen:
        parser.error(f"there is no {', '.join(arguments.names)}")
    figures: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'step':<34}{'way':<14}" + "".join(f"{part:>14}" for part in _PARTS))
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            for way in arguments.ways:
                measured = _in_process(name, way, folder, arguments.phases)
                times = {part: measured[part] for part in _PARTS if part in measured}
                figures.setdefault(name, {})[way] = times
                cells = (f"{times[part]:.2f}" if part in times else "" for part in _PARTS)
                print(f"{name:<34}{way:<14}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
                for phase, seconds in measured["phases"]:
                    print(f"{seconds:>36.2f}  {phase}")
    if arguments.save:
        arguments.save.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
