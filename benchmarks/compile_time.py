"""The compile time of training steps, and its distribution over the passes.

``python benchmarks/compile_time.py`` compiles the training step of each network three times, in
separate processes: without a directory of compiled functions, with an empty one (cold), and with
the directory that the second run has filled (warm). The table gives the wall time and the processor
time of ``tvm.compile`` and loading in seconds, for TVM in one thread and for relax_grad's pipeline.
``--phases`` adds the slowest passes; it generates all functions, including those with machine code
in the directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter

import _models
import _steps
import torch
import tvm
from torch import nn
from torch.nn import functional as F
from tvm import relax

import relax_grad


class GRU(nn.Module):
    """A layer of gated recurrent units, imported step by step, and a classifier of its last
    state."""

    def __init__(self, inputs: int = 64, width: int = 128, classes: int = 10):
        super().__init__()
        self.layer = nn.GRU(inputs, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.layer(x)[0][:, -1]), labels)


STEPS = {
    step.name.partition(",")[0]: step
    for step in [
        *_models.STEPS,
        _models.Step(
            "GRU, 32 steps of 32x64, 128 wide",
            GRU,
            lambda: (torch.randn(32, 32, 64), torch.randint(0, 10, (32,))),
        ),
    ]
}

WAYS = ("one thread", "threads", "cold", "warm")


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


def measure(name: str, way: str, directory: str, phases: bool) -> dict:
    """Compile and load a training step; return the wall time, the processor time and the times of
    passes."""
    network, inputs = _steps.initial(STEPS[name])
    module, _arrays = _steps.in_relax(network, inputs)
    relax_grad.cache(directory if way in ("cold", "warm") else None)
    pipeline = relax_grad.pipeline() if way == "one thread" else "relax_grad"
    instruments = [_Phases()] if phases else []
    start, used = time.perf_counter(), time.process_time()
    with tvm.transform.PassContext(instruments=instruments):
        executable = tvm.compile(module, relax_grad.target.host(), relax_pipeline=pipeline)
    compiled = time.perf_counter()
    relax.VirtualMachine(executable, tvm.cpu())
    loaded = time.perf_counter()
    return {
        "compile": compiled - start,
        "load": loaded - compiled,
        "processors": time.process_time() - used,
        "phases": instruments[0].seconds.most_common(12) if phases else [],
    }


def _in_process(*arguments: str) -> dict:
    command = [sys.executable, __file__, "--one", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--phases", action="store_true", help="the passes that take longest")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS, help="default: all")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.phases)))
        return
    unknown = set(arguments.names) - set(STEPS)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    print(f"{'step':<14}{'way':<12}{'compile':>10}{'load':>8}{'processors':>12}")
    for name in arguments.names or STEPS:
        with tempfile.TemporaryDirectory() as directory:
            for way in arguments.ways:
                options = ["--phases"] if arguments.phases else []
                measured = _in_process(name, way, directory, *options)
                times = [measured[key] for key in ("compile", "load", "processors")]
                print(f"{name:<14}{way:<12}{times[0]:>10.2f}{times[1]:>8.2f}{times[2]:>12.2f}")
                for phase, seconds in measured["phases"]:
                    print(f"{seconds:>36.2f}  {phase}")


if __name__ == "__main__":
    main()
