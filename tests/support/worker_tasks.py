"""Tasks that tests run on workers, which import this module."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import tvm

from relax_grad.distributed._tasks import Worker, task


@task
def send_and_recv(worker: Worker, count: int) -> list[float]:
    """Send a tensor from worker 0 to worker 1 and back."""
    buffer = tvm.runtime.tensor(np.full(count, float(count) if worker.rank == 0 else 0, "float32"))
    call = worker.communicator.call
    if worker.rank == 0:
        call("send_to_worker", (buffer, 1))
        buffer = tvm.runtime.tensor(np.zeros(count, "float32"))
        call("recv_from_worker", (buffer, 1))
    elif worker.rank == 1:
        call("recv_from_worker0", (buffer,))
        call("send_to_worker", (buffer, 0))
    return buffer.numpy().tolist()


@task
def to_next_group(worker: Worker, value: float) -> float | None:
    """Send ``value`` plus the worker's number to the worker at the same place in the next group;
    return the received one."""
    communicator = worker.communicator
    groups = communicator.num_groups
    size = worker.num_workers // groups
    buffer = tvm.runtime.tensor(np.full(1, value + worker.rank, "float32"))
    if worker.rank < worker.num_workers - size:
        communicator.call("send_to_next_group", (buffer,))
    if worker.rank < size:
        return None
    communicator.call("recv_from_prev_group", (buffer,))
    return float(buffer.numpy()[0])


@task
def disturb(worker: Worker, name: str, rank: int) -> None:
    """Change a bit of the first parameter of one worker."""
    if worker.rank == rank:
        tensor = worker.kept[name].groups["params"][0]
        data = tensor.numpy()
        data.reshape(-1).view("uint8")[0] ^= 1
        tensor.copyfrom(data)


@task
def reduce_twice(worker: Worker, seconds: float) -> dict:
    """Start two reductions, overwrite their operands, and wait for them in the other order,
    ``seconds`` later.

    The network carries one reduction in a quarter of these seconds.
    """
    communicator = worker.communicator
    operand = tvm.runtime.tensor(np.full(3, worker.rank + 1.0, "float32"))
    communicator.call("allreduce", (operand, 0, False, tvm.runtime.empty((3,), "float32")))
    communicator.slowed = lambda name, size: seconds / 4
    before = communicator.seconds, communicator.waited
    begun = time.perf_counter()
    started = [communicator.start_allreduce([operand], kind) for kind in ("sum", "avg")]
    done = time.perf_counter() - begun
    operand.copyfrom(np.full(3, np.nan, "float32"))
    time.sleep(seconds)
    values = [communicator.wait(request)[0].numpy().tolist() for request in started[::-1]]
    communicator.slowed = None
    return {
        "values": values,
        "starting": done,
        "seconds": communicator.seconds - before[0],
        "waited": communicator.waited - before[1],
    }


@task
def reduce_with_slow_network(worker: Worker, seconds: float) -> list[float]:
    """Return the time and the wait of two reductions of ``seconds`` each, with no computation
    beside them."""
    communicator = worker.communicator
    operand = tvm.runtime.tensor(np.ones(3, "float32"))
    communicator.call("allreduce", (operand, 0, False, operand))
    communicator.slowed = lambda name, size: seconds
    before = communicator.seconds, communicator.waited
    started = [communicator.start_allreduce([operand], "sum") for _ in range(2)]
    for request in started:
        communicator.wait(request)
    communicator.slowed = None
    return [communicator.seconds - before[0], communicator.waited - before[1]]


@task
def reduce_beside(worker: Worker, rank: int, ends: bool) -> None:
    """Start a reduction that one worker never joins: it ends, or hangs."""
    if worker.rank == rank:
        if ends:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    operand = tvm.runtime.tensor(np.ones(3, "float32"))
    worker.communicator.wait(worker.communicator.start_allreduce([operand], "sum"))


@task
def reduce_nothing(worker: Worker) -> list[int]:
    """Return the shape of the sum of tensors without elements."""
    started = [
        worker.communicator.start_allreduce([tvm.runtime.empty((0, 3), "float32")], "sum")
        for _ in range(2)
    ]
    return [int(extent) for extent in worker.communicator.wait(started[0])[0].shape]
