"""Messages in memory that the workers of a machine share; here the workers are threads."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import tvm

from relax_grad.distributed import _memory, _shared
from relax_grad.distributed._memory import Ended, Messages
from relax_grad.distributed._shared import Shared

pytestmark = pytest.mark.skipif(
    not _memory.is_available(), reason="this system has no memory without a name"
)


@pytest.fixture
def run(monkeypatch):
    """Return a function that calls another one with the transport of each of some workers, in
    threads, and returns the results. Memory is for 4 KiB of messages."""
    for module in (_memory, _shared):
        monkeypatch.setattr(module, "CAPACITY", 4096)

    def run(workers: int, function, *, timeout: float = 30.0, ends_after: float | None = None):
        handle = _memory.create(workers)
        members = {rank: rank for rank in range(workers)}
        outcomes: list = [None] * workers

        def work(rank: int) -> None:
            transport = Shared(Messages(handle, 0, rank, members, workers, timeout))
            try:
                outcomes[rank] = function(transport)
            except Exception as error:
                outcomes[rank] = error
            finally:
                transport.close()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
        for thread in threads:
            thread.start()
        if ends_after is not None:
            time.sleep(ends_after)
            _memory.end(handle)
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        os.close(handle)
        return outcomes

    return run


def filled(value: float, count: int, dtype: str = "float32"):
    return tvm.runtime.tensor(np.full(count, value, dtype))


@pytest.mark.parametrize(("workers", "seed"), [(2, 0), (3, 1), (5, 2)])
def test_many_calls_in_little_memory(run, workers, seed):
    """Reductions that have started, and all others, with waits in any order and workers of
    different speed. The messages of some calls are larger than the memory."""

    def calls(transport):
        rng, own = np.random.default_rng(seed), np.random.default_rng(transport.rank)
        started, right = [], []

        def finish(i: int) -> None:
            reduction, results, wanted = started.pop(i)
            reduction.wait()
            right.append(all((result.numpy() == wanted).all() for result in results))

        for step in range(60):
            if own.random() < 0.2:
                time.sleep(0.002)
            count = int(rng.integers(1, 1500 if rng.random() < 0.2 else 200))
            kind = rng.choice(["start", "start", "sum", "broadcast", "gather", "send"])
            values = [filled(transport.rank + step, count), filled(transport.rank - step, 3)]
            total = workers * (workers - 1) // 2
            if kind == "start":
                results = [filled(np.nan, count), filled(np.nan, 3)]
                reduction = transport.start_allreduce(values[:1], "sum", results[:1])
                started.append((reduction, results[:1], total + workers * step))
                for value in values:
                    value.copyfrom(np.full(value.shape, np.nan, "float32"))
            elif kind == "sum":
                results = [filled(np.nan, count), filled(np.nan, 3)]
                transport.allreduce(values, "max", results)
                right.append((results[0].numpy() == workers - 1 + step).all())
                right.append((results[1].numpy() == workers - 1 - step).all())
            elif kind == "broadcast":
                transport.broadcast(values[0] if transport.rank == 0 else None, values[0])
                right.append((values[0].numpy() == step).all())
            elif kind == "gather":
                whole = filled(np.nan, workers * count)
                transport.allgather(values[0], whole)
                wanted = np.repeat(np.arange(workers) + step, count)
                right.append((whole.numpy() == wanted).all())
            elif transport.rank == 0:
                transport.send(values[0], workers - 1)
            elif transport.rank == workers - 1:
                transport.recv(values[0], 0)
                right.append((values[0].numpy() == step).all())
            if started and rng.random() < 0.5:
                finish(int(rng.integers(len(started))))
        while started:
            finish(0)
        return bool(all(right)) and len(right) > 20

    assert run(workers, calls) == [True] * workers


def test_a_worker_that_is_slow_to_read_its_own_message(run):
    """Its memory is not given to a later message when the others have read it."""

    def calls(transport):
        results = [filled(np.nan, 100) for _ in range(20)]
        started = []
        for i, result in enumerate(results):
            started.append(transport.start_allreduce([filled(i, 100)], "avg", [result]))
            if transport.rank:
                started[-1].wait()
        if not transport.rank:
            time.sleep(0.05)
        for reduction in started:
            reduction.wait()
        return [float(result.numpy().mean()) for result in results]

    assert run(2, calls) == [[float(i) for i in range(20)]] * 2


@pytest.mark.parametrize("workers", [1, 3])
def test_results_have_the_same_bits_and_means_are_rounded_once(run, workers):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(workers, 70001)).astype("float32")

    def calls(transport):
        result = filled(np.nan, inputs.shape[1])
        own = tvm.runtime.tensor(inputs[transport.rank])
        transport.allreduce([own], "avg", [result])
        return result.numpy()

    results = run(workers, calls)
    total = inputs[0].copy()
    for addend in inputs[1:]:
        total += addend
    for result in results:
        np.testing.assert_array_equal(result, total / np.float32(workers))


def test_different_sizes_are_an_error(run):
    def calls(transport):
        result = filled(0.0, 100 + 100 * transport.rank)
        transport.allreduce([result], "sum", [result])

    texts = [str(error) for error in run(2, calls)]
    assert texts[0].startswith("worker 1 has given 832 bytes, but worker 0 expects 448")
    assert texts[1].startswith("worker 0 has given 448 bytes, but worker 1 expects 832")


def test_a_worker_that_does_not_come(run):
    def calls(transport):
        if transport.rank == 0:
            transport.recv(filled(0.0, 3), 1)

    error, _ = run(2, calls, timeout=0.3)
    assert isinstance(error, TimeoutError)
    assert str(error) == "worker 1 has not come within 0.3 s"
    start = time.monotonic()
    error, _ = run(2, calls, ends_after=0.1)
    assert isinstance(error, Ended)
    assert time.monotonic() - start < 5.0
