"""The subprocess of ``guard`` that runs kernels; a fault ends only a child of it, and is a
finding.

Its environment has ``TVM_NUM_THREADS=1``, since threads of a pool do not survive a fork.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import tvm
from machines import TARGETS
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline

from relax_grad.testing import _program

from . import Finding
from .calls import Call, variations
from .memory import Workspaces
from .programs import (
    TARGET,
    Kernel,
    Program,
    build,
    calls_ours,
    details,
    exposed,
    legalize,
    schedule,
)

#: The number of programs that are compiled together.
BATCH = 25
#: The fill byte around the buffers and initially in the outputs: NaN at the end, a number at the
#: start.
_PLACEMENTS = {"at the end": 0xFF, "at the start": 0x2A}
_SKIP_RUN = 1


class _Batch:
    """Programs that are compiled together, and the runner of their kernels."""

    def __init__(
        self, programs: Sequence[Program], done: set, adversarial, ours, time_limit, machine
    ):
        self.programs, self.adversarial, self.ours = programs, adversarial, ours
        self.time_limit = time_limit
        merged = _program.merge([program.module for program in programs])
        self.workspaces: Workspaces | None = None  # for kernels that allocate at run time
        if machine:
            target = {**TARGETS[machine], "opt-level": 0}  # LLVM's optimizer takes half of the time
            self._schedule(merged, tvm.target.Target(target))
        else:
            self._legalize(merged)
        self._machine.set_instrument(self._instrument)
        self.done = done  # the kernels that have run, with their shapes
        self.broken: set[str] = set()  # the kernels that end a process
        self._guarded: dict[str, list[bytes]] = {}  # the results of the running kernel

    def _legalize(self, merged: tvm.IRModule) -> None:
        module, self.kernels = legalize(merged)
        passes = pipeline.dataflow_lower_passes(TARGET) + pipeline.finalize_passes(TARGET)
        executable = tvm.compile(module, TARGET, relax_pipeline=tvm.transform.Sequential(passes))
        self._machine = relax.VirtualMachine(executable, tvm.cpu())
        guarded = {
            name: exposed(module[name]).with_attr("global_symbol", name)
            for name, kernel in self.kernels.items()
            if kernel.workspaces
        }
        compiled = tvm.compile(tvm.IRModule(guarded), TARGET) if guarded else {}
        for name in guarded:
            self.kernels[name].guarded = compiled[name]

    def _schedule(self, merged: tvm.IRModule, target: tvm.target.Target) -> None:
        module, self.kernels = schedule(merged, target)
        nothing = tvm.transform.Sequential([])
        executable = tvm.compile(module, target, relax_pipeline=nothing)
        with tempfile.TemporaryDirectory() as folder:
            library = str(Path(folder) / "programs.so")
            executable.export_library(library)
            loaded = tvm.runtime.load_module(library)
            self.workspaces = Workspaces(library)
        self._machine = relax.VirtualMachine(loaded, tvm.cpu())

    def run(self, first: int, send) -> None:
        """Run the programs from number ``first`` on, and send events, in a process that may
        crash."""
        self._send = send
        for number in range(first, len(self.programs)):
            send("case", number)
            values = [tvm.runtime.tensor(value) for value in self.programs[number].values]
            self._machine[f"main_{number + 1}"](*values)

    def _instrument(self, function, symbol, before, result, *args):
        kernel = self.kernels.get(str(symbol))
        if kernel is None or (self.ours and not kernel.ours):
            return 0
        call = Call(kernel, function, args, self.workspaces)
        key = call.key
        if before and key in self.broken:
            for output in call.outputs():
                output.copyfrom(np.zeros(output.shape, output.numpy().dtype))
            return _SKIP_RUN
        if before and key not in self.done:
            self.done.add(key)
            self._send("kernel", [key, call.title])
            self._guarded[key] = self._replays(call)
            self._send("done", None)
        elif not before and key in self._guarded:
            results = call.results()
            if self._guarded.pop(key) not in (None, results):
                self._send("finding", [call.title, "the results differ from those without guards"])
        return 0

    def _replays(self, call: Call) -> list[bytes] | None:
        """Run a kernel in every placement, with its own inputs and others; return the results for
        its own inputs."""
        results = self._both(call, "as called", call.inputs)
        if results is None:
            self._send("finding", [call.title, "as called: it raises an error"])
        if self.adversarial:
            for what, inputs in variations(call):
                self._both(call, what, inputs)
        return results

    def _both(self, call: Call, what: str, inputs: Sequence[bytes]) -> list[bytes] | None:
        """Run a kernel in both placements and compare; return the results, or None after an
        error."""
        runs = []
        for placement, fill in _PLACEMENTS.items():
            self._send("replay", f"{what}, {placement}")
            signal.alarm(self.time_limit)
            results, faults = call.replay(inputs, placement == "at the end", fill)
            signal.alarm(0)
            runs.append(results)
            for fault in faults:
                self._send("finding", [call.title, f"{what}, {placement}: {fault}"])
        if runs[0] != runs[1]:
            fault = (
                f"{what}: the results depend on the memory around, or on the old contents of the "
                "outputs"
            )
            self._send("finding", [call.title, fault])
        return runs[0]


def _check(batch: _Batch, report) -> int:
    """Run a batch in child processes, restarted after a crash; return the number of kernel runs."""
    first = replays = 0
    while first < len(batch.programs):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            _run_child(batch, first, write)
        os.close(write)
        key = title = replay = error = None
        with os.fdopen(read) as events:
            for event, value in map(json.loads, events):
                if event == "case":
                    first = value
                elif event == "kernel":
                    key, title = value
                    batch.done.add(key)
                elif event == "replay":
                    replay = value
                    replays += 1
                elif event == "done":
                    title = None
                elif event == "error":
                    error = value
                else:
                    report(batch, first, *value)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        ended = signal.Signals(status & 0x7F).name if status & 0x7F else error
        if title is None:
            report(batch, first, "", f"the program ended without guards: {ended}")
            first += 1
            continue
        report(batch, first, title, f"{replay}: {ended}")
        if replay.startswith("as called"):
            batch.broken.add(key)
    return replays


def _run_child(batch: _Batch, first: int, write: int) -> None:
    status = 1
    try:
        with os.fdopen(write, "w") as events:

            def send(event, value):
                events.write(json.dumps([event, value]) + "\n")
                events.flush()

            try:
                batch.run(first, send)
                status = 0
            except Exception:
                send("error", traceback.format_exc())
    finally:
        os._exit(status)


def main(job: str) -> None:
    """Run the job of :func:`guard.run_guarded` in this file; print findings, and the numbers of
    kernels and runs."""
    cases, adversarial, ours, time_limit, machine = pickle.loads(Path(job).read_bytes())
    done: set[str] = set()
    replays = 0

    def report(batch, number, title, what):
        name = title.partition("(")[0]
        kernel = batch.kernels.get(name, Kernel(name, 0))
        case = batch.programs[number].case.name
        finding = Finding(case, title, sorted(kernel.ops), kernel.ours or not name, what)
        print(json.dumps(vars(finding)), flush=True)

    for start in range(0, len(cases), BATCH):
        chunk = cases[start : start + BATCH]
        print("/".join((chunk[0].name, chunk[-1].name)), flush=True)
        with ExitStack() as stack:
            for within in dict.fromkeys(details(case)[-1] for case in chunk):
                stack.enter_context(within())
            programs = [build(case) for case in chunk]
            if ours:
                programs = [program for program in programs if calls_ours(program.module)]
            batch = _Batch(programs, done, adversarial, ours, time_limit, machine)
            replays += _check(batch, report)
    counts = {"kernels": len(done), "ours": sum(" True " in key for key in done)}
    print(json.dumps({**counts, "replays": replays}))
