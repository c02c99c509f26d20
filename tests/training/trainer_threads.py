"""Trains by the library for C through ctypes: one trainer for each seed, one after another and then
at once.

The arguments are the library, and the folder of a step with the input x of a symbolic number of
rows. It ends with an error if the losses differ.
"""

from __future__ import annotations

import ctypes
import sys
import threading

import numpy as np
from c_trainer import Result, Tensor, Type, call

SEEDS, STEPS = range(3), 40


def train(seed: int, losses: dict[int, list[float]]) -> None:
    trainer, kind = ctypes.c_void_p(), Type()
    call("open", sys.argv[2].encode(), None, ctypes.byref(trainer))
    call("batch", trainer, ctypes.c_int64(0), ctypes.byref(kind))
    # The first axis has a symbol; the second one has a number.
    assert (kind.name, kind.shape[0], kind.symbols[0], kind.symbols[1]) == (b"x", -1, b"n", None)
    rng, history = np.random.default_rng(seed), []
    for _ in range(STEPS):
        rows = int(rng.integers(1, 100))
        x = rng.normal(size=(rows, kind.shape[1])).astype("float32")
        shape = (ctypes.c_int64 * 2)(*x.shape)
        batch = Tensor(b"x", b"float32", 2, shape, x.ctypes.data, x.nbytes)
        result = Result()
        call("step", trainer, ctypes.byref(batch), ctypes.c_int64(1), ctypes.byref(result))
        history.append(result.loss)
    call("close", trainer)
    losses[seed] = history


alone: dict[int, list[float]] = {}
for seed in SEEDS:
    train(seed, alone)
at_once: dict[int, list[float]] = {}
threads = [threading.Thread(target=train, args=(seed, at_once)) for seed in SEEDS]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert at_once == alone, (at_once, alone)
print("the same losses")
