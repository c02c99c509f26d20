"""Tasks of workers for measurements: a slower network, the time of an allreduce, and the events of
a step.

Workers import this module.
"""

from __future__ import annotations

import time

import numpy as np
import tvm
from _cluster import Network, seconds_of

from relax_grad.distributed._collectives import _key
from relax_grad.distributed._tasks import Worker, task

#: The names of collectives in the model of the network.
NAMES = {"allreduce": "allreduce", "broadcast_from_worker0": "broadcast", "send_to_worker": "send"}


@task
def slow_down(worker: Worker, latency: float, bandwidth: float) -> None:
    """Let each collective take at least the time of a network; a bandwidth of 0 stands for no
    limit."""
    network, count = Network(latency, bandwidth), worker.num_workers

    def seconds(name: str, size: int) -> float:
        return seconds_of(NAMES.get(name, ""), size, count, network)

    worker.communicator.slowed = seconds if bandwidth else None


@task
def time_allreduce(worker: Worker, elements: int, repeats: int) -> float:
    """Return the median seconds of an allreduce of float32."""
    send = tvm.runtime.tensor(np.ones(elements, "float32"))
    recv = tvm.runtime.empty((elements,), "float32")
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        worker.communicator.call("allreduce", (send, 0, False, recv))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@task
def record(worker: Worker) -> None:
    """Record the collectives of worker 0 from now on."""
    if worker.rank == 0:
        worker.kept["recorder"] = _Recorder(worker.communicator)


@task
def recorded(worker: Worker) -> list | None:
    """Return the events of worker 0, and record no more: a kind, bytes, the begin, the end, and the
    seconds of its own."""
    recorder = worker.kept.pop("recorder", None)
    return None if recorder is None else recorder.end()


class _Recorder:
    """The events of a communicator, whose methods it wraps."""

    def __init__(self, communicator):
        self._communicator, self._events = communicator, []
        for name in ("call", "start_allreduce", "wait"):
            setattr(communicator, name, getattr(self, f"_{name}"))

    def end(self) -> list:
        for name in ("call", "start_allreduce", "wait"):
            delattr(self._communicator, name)
        return self._events

    def _call(self, name, arguments):
        used, begin, before = self._communicator, time.perf_counter(), self._communicator.sent
        type(used).call(used, name, arguments)
        kind = NAMES.get(name, name)
        self._note(kind, used.sent - before, begin, 0.0)

    def _start_allreduce(self, sends, kind, *more):
        used, begin, before = self._communicator, time.perf_counter(), self._communicator.sent
        request = type(used).start_allreduce(used, sends, kind, *more)
        self._note("start", used.sent - before, begin, time.perf_counter() - begin)
        return request

    def _wait(self, recvs):
        used, begin = self._communicator, time.perf_counter()
        started = used._started.get(_key(recvs))
        result = type(used).wait(used, recvs)
        ended = begin if started is None else max(started.reduction.ended or begin, started.least)
        self._note("wait", 0, begin, time.perf_counter() - max(begin, ended))
        return result

    def _note(self, kind, size, begin, own):
        self._events.append([kind, size, begin, time.perf_counter(), own])
