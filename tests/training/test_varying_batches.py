"""The memory of a trainer of batches of varying size is about that of the largest batch."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from training_models import MOST, WIDTH, symbolic

from relax_grad.training import SGD, Trainer, _allocator, memory_of, train_step

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the resident memory is read from /proc"
)


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_sizes_take_the_memory_of_the_largest(monkeypatch):
    step = train_step(symbolic(), SGD(0.01), wrt="w")
    long_trainer = Trainer(step, values={"w": np.eye(WIDTH, dtype="float32")})
    cleared = []
    free = _allocator._free
    monkeypatch.setattr(_allocator, "_free", lambda: (cleared.append(1), free()))
    data = np.full((MOST, WIDTH), 0.5, "float32")
    for _ in range(5):
        long_trainer.step(data)
    assert len(cleared) == 1  # batches of the same size reuse memory
    largest = memory_of(step, extents={"n": MOST}).peak
    start = resident()
    for i in range(200):
        long_trainer.step(data[: 1 + i * 37 % MOST])
    # Each size on its own would be 60 times as much. The process itself grows by some megabytes
    # after other tests.
    assert resident() - start < 0.5 * largest + 16e6, largest
    assert len(cleared) == 201
