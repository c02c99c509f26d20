"""Tasks of workers for measurements: a slower network, and the time of an allreduce. Workers import this module."""

from __future__ import annotations

import time

import numpy as np
import tvm

from relax_grad.distributed._tasks import Worker, task


@task
def slow_down(worker: Worker, bytes_per_second: float, latency: float) -> None:
    """Let each collective take the time of a network of this bandwidth and latency; 0 bytes a second stands for no limit."""
    workers = worker.num_workers

    def seconds(name: str, size: int) -> float:
        hops = 2 * (workers - 1) if name == "allreduce" else workers - 1
        return hops * (latency + size / workers / bytes_per_second)

    worker.communicator.slowed = seconds if bytes_per_second else None


@task
def time_allreduce(worker: Worker, elements: int, repeats: int) -> float:
    """Return the least seconds of an allreduce of float32."""
    send = tvm.runtime.tensor(np.ones(elements, "float32"))
    recv = tvm.runtime.empty((elements,), "float32")
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        worker.communicator.call("allreduce", (send, 0, False, recv))
        found.append(time.perf_counter() - start)
    return min(found)
