"""Run kernels with their tensors and workspaces flush against inaccessible pages.

A subprocess compiles the kernels of ``kernel_cases`` and runs each several times: with all
tensors and workspaces ending at an inaccessible page, and with all beginning after one. The
surrounding bytes and the initial contents differ between the runs, so that a read of any of them
changes the results. Further runs replace integers by values at and beyond the limits, and floats by
infinities and NaN. Others tell whether kernels compute with denormal numbers of such contents: see
``denormals.py``.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tvm
from denormals import computes_with_denormals
from kernel_cases import cases
from kernel_cases.case import KernelCall, KernelCase, kernel_of
from machines import PAIRS, TARGETS, TILES, compile_kernels
from processes import run_guard

from .memory import Place, Workspaces, repeated

#: The fill byte around the tensors, and initially in outputs and workspaces.
_PLACEMENTS = {"at the end": 0xFF, "at the start": 0x2A}
#: The batch of static kernels, and the batches of symbolic ones.
_STATIC, _SYMBOLIC = 3, (1, 2, 3, 17)
#: Seconds after which a kernel counts as endless.
_TIME_LIMIT = 60


def run_guarded_kernels(
    target: str, numbers: Sequence[int], dtype: str = "float32", *, optimized: bool = False
) -> list[str]:
    """Run the kernels of the cases of these numbers, static and symbolic, and return the findings.

    The floats of the kernels are stored in a dtype. Without LLVM's optimizations a kernel accesses
    the same memory, and compiles in two thirds of the time; no dead read is removed.
    """
    code, output, errors = run_guard("guard.kernels", target, list(numbers), dtype, optimized)
    assert code == 0, errors[-2000:]
    *findings, last = output.splitlines()
    assert int(last) > 0
    return findings


def _contents(call: KernelCall, inputs) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield arrays for the inputs of a kernel, each time with a description."""
    rng = np.random.default_rng(zlib.crc32(call.case.name.encode()))
    plain = []
    for shape, dtype in inputs:
        if dtype.startswith("int"):
            plain.append(rng.integers(-5, 5, shape).astype(dtype))
        else:
            plain.append(rng.normal(size=shape).astype(dtype))
    yield "plain", plain
    wild = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, 0], "float32")
    yield (
        "wild floats",
        [
            x
            if x.dtype.kind == "i"
            else np.where(rng.random(x.shape) < 0.3, rng.choice(_of(wild, x.dtype), x.shape), x)
            for x in plain
        ],
    )
    extents = {extent for shape, _ in inputs for extent in shape} | {5}
    for i, x in enumerate(plain):
        if x.dtype.kind != "i":
            continue
        limits = _limits(extents, x.dtype)
        for value in limits:
            yield f"integers {value}", [*plain[:i], np.full_like(x, value), *plain[i + 1 :]]
        yield "mixed integers", [*plain[:i], rng.choice(limits, x.shape), *plain[i + 1 :]]


def _of(floats: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return floats in another dtype, in which large ones may be infinite."""
    with np.errstate(over="ignore"):
        return floats.astype(dtype)


def _limits(extents: set[int], dtype: np.dtype) -> np.ndarray:
    """Return integers at and beyond the limits of axes and dtypes."""
    info = np.iinfo(dtype)
    values = {0, -1, 10**6, -(10**6), info.min, info.min + 1, info.max}
    values |= {sign * v + i for v in extents for sign in (1, -1) for i in (-1, 0, 1)}
    values |= {sign * 2**power + i for power in (31, 32) for sign in (1, -1) for i in (-1, 0, 1)}
    return np.array([v for v in sorted(values) if info.min <= v <= info.max], dtype)


class _Runner:
    """A runner for the kernels of calls, compiled together."""

    def __init__(self, calls: Sequence[KernelCall], target: tvm.target.Target, folder: str):
        self.calls = calls
        functions = {f"kernel{i}": call.function for i, call in enumerate(calls)}
        library = str(Path(folder) / "kernels.so")
        compile_kernels(functions, target).export_library(library)
        self._module = tvm.runtime.load_module(library)
        self._workspaces = Workspaces(library)
        self._places: dict[tuple[int, bool], Place] = defaultdict(Place)

    def run(self, first: int, send: Callable[[str], None]) -> None:
        """Run kernels from number ``first`` on, and send the progress and the findings."""
        for number in range(first, len(self.calls)):
            send(f"kernel {number}")
            call = self.calls[number]
            symbolic = any(isinstance(e, tvm.tirx.Var) for e in _extents(call))
            for batch in _SYMBOLIC if symbolic else (_STATIC,):
                inputs, outputs = call.at(batch)
                for what, arrays in _contents(call, inputs):
                    self._both(number, f"batch {batch}, {what}", arrays, outputs, send)
                    if what == "plain" and self._has_denormals(number, arrays, outputs):
                        send(f"finding batch {batch}: old contents are denormal operands")

    def _has_denormals(self, number, arrays, outputs) -> bool:
        """Tell whether a kernel computes with what its workspaces and results held before."""

        def prepared(content: bytes) -> Callable[[], object]:
            self._workspaces.number = content
            tensors = list(map(tvm.runtime.tensor, arrays))
            for shape, dtype in outputs:
                size = math.prod(shape) * np.dtype(dtype).itemsize
                result = np.frombuffer(repeated(content, size), dtype).reshape(shape)
                tensors.append(tvm.runtime.tensor(result))
            return functools.partial(self._module[f"kernel{number}"], *tensors)

        found = computes_with_denormals(prepared)
        self._workspaces.number = None
        return found

    def _both(self, number, what, arrays, outputs, send) -> None:
        runs = []
        for placement, fill in _PLACEMENTS.items():
            send(f"replay {what}, {placement}")
            signal.alarm(_TIME_LIMIT)
            results, faults = self._once(number, arrays, outputs, placement == "at the end", fill)
            signal.alarm(0)
            runs.append(results)
            for fault in faults:
                send(f"finding {what}, {placement}: {fault}")
        if not all(map(_same, [dtype for _, dtype in outputs], *runs)):
            fault = "the results depend on the memory around, or on its old contents"
            send(f"finding {what}: {fault}")

    def _once(self, number, arrays, outputs, at_end: bool, fill: int) -> tuple:
        self._workspaces.at_end, self._workspaces.fill = at_end, fill
        buffers = []
        for array in arrays:
            place = self._place(len(buffers), at_end)
            data = array.tobytes()
            buffers.append(place.hold(data, array.shape, array.dtype.name, at_end, fill))
        for shape, dtype in outputs:
            place = self._place(len(buffers), at_end)
            data = bytes([fill]) * (math.prod(shape) * np.dtype(dtype).itemsize)
            buffers.append(place.hold(data, shape, dtype, at_end, fill))
        self._module[f"kernel{number}"](*(buffer.tensor for buffer in buffers))
        faults, self._workspaces.faults = self._workspaces.faults, []
        if not all(buffer.is_clean() for buffer in buffers):
            faults.append("bytes next to a tensor were overwritten")
        for array, buffer in zip(arrays, buffers, strict=False):
            if buffer.data() != array.tobytes():
                faults.append("an input was overwritten")
        return [buffer.data() for buffer in buffers[len(arrays) :]], faults

    def _place(self, number: int, at_end: bool) -> Place:
        return self._places[number, at_end]


def _same(dtype: str, first: bytes, other: bytes) -> bool:
    """Compare bits, except those of NaN, which depend on which operand of an instruction is in
    memory."""
    a, b = (np.frombuffer(data, dtype) for data in (first, other))
    if a.dtype.kind == "i":
        return first == other
    bits = f"int{8 * a.dtype.itemsize}"
    return np.array_equal(
        np.where(np.isnan(a), 0, a.view(bits)), np.where(np.isnan(b), 0, b.view(bits))
    ) and np.array_equal(np.isnan(a), np.isnan(b))


def _extents(call: KernelCall) -> list:
    return [extent for shape, _ in call.inputs for extent in shape]


def _check(runner: _Runner) -> int:
    """Run all kernels in child processes, restarted after a crash; print findings, return the
    number of runs."""
    first = runs = 0
    while first < len(runner.calls):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            with os.fdopen(write, "w", buffering=1) as events:
                runner.run(first, lambda event: print(event, file=events))
            os._exit(0)
        os.close(write)
        doing = ""
        with os.fdopen(read) as events:
            for event in events:
                kind, _, rest = event.strip().partition(" ")
                if kind == "kernel":
                    first = int(rest)
                elif kind == "replay":
                    doing, runs = rest, runs + 1
                else:
                    print(f"{runner.calls[first].case.name}: {rest}")
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        ended = signal.Signals(status & 0x7F).name if status & 0x7F else f"status {status >> 8}"
        print(f"{runner.calls[first].case.name}: {doing}: {ended}")
        first += 1
    return runs


def main(name: str, numbers: Sequence[int], dtype: str, optimized: bool) -> None:
    """Check the cases of these numbers for the named target, with floats of a dtype."""
    level = {} if optimized else {"opt-level": 0}
    target = tvm.target.Target((TARGETS | PAIRS | TILES)[name] | level)
    known: list[KernelCase] = cases()
    chosen = [known[number] for number in numbers]
    calls = [kernel_of(case, target, batch, dtype) for case in chosen for batch in (_STATIC, None)]
    with tempfile.TemporaryDirectory() as folder:
        print(_check(_Runner(calls, target, folder)))
