"""Runs a step of the library for C of which each allocation fails in turn, and examines that the
trainer is as before, or refuses each call but ``load``.

The arguments are the library, the folder of a step with the input x of a symbolic number of rows
and three columns in float32, and the library of ``failing_memory.c``, which LD_PRELOAD names too.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys

import numpy as np
from c_trainer import Result, Tensor, Trainer, error_of, library

MODEL = sys.argv[2]
STATE = os.path.join(MODEL, "state.safetensors")
OUTCOMES = ["before", "half", "after", "ended"]
failing = ctypes.CDLL(sys.argv[3])


def step(trainer: Trainer, rows: int, number: int, least: int) -> tuple[str, int]:
    """Run a step in which an allocation of at least so many bytes fails; return the error, and the
    number of allocations."""
    x = np.ones((rows, 3), "float32")
    shape = (ctypes.c_int64 * 2)(*x.shape)
    batch = Tensor(b"x", b"float32", 2, shape, x.ctypes.data, x.nbytes)
    result, count = Result(), ctypes.c_int64()
    function = ctypes.cast(library.relax_grad_step, ctypes.c_void_p)
    others = trainer.handle, ctypes.byref(batch), ctypes.byref(result)
    if failing.step_without_memory(
        function, *others, ctypes.c_int64(number), ctypes.c_uint64(least), ctypes.byref(count)
    ):
        return library.relax_grad_last_error().decode(), count.value
    return "", count.value


def outcome(trainer: Trainer, number: int, least: int, before: bytes, after: bytes) -> str:
    """Return the outcome of a step in which an allocation fails."""
    error, _ = step(trainer, 3, number, least)
    if not error:  # the runtime does without the memory
        assert trainer.state() == after
        return "after"
    if not error_of(trainer.state):
        assert trainer.state() == before
        trainer.step(np.ones((3, 3), "float32"))
        assert trainer.state() == after
        return "before"
    for call in (
        trainer.state,
        lambda: trainer.step(np.ones((2, 3), "float32")),
        lambda: trainer.save(f"{STATE}.half"),
    ):
        refused = error_of(call)
        assert re.search("an earlier step failed: .* no call but Load works", refused), refused
    assert not os.path.exists(f"{STATE}.half")
    trainer.load(STATE)
    assert trainer.state() == before
    return "half"


def examine(least: int) -> dict[str, int]:
    """Return the numbers of outcomes."""
    trainer = Trainer(MODEL)
    before = trainer.state()
    # Another number of rows takes all memory anew.
    step(trainer, 2, 0, least)
    trainer.load(STATE)
    _, count = step(trainer, 3, 0, least)
    after = trainer.state()
    step(trainer, 2, 0, least)
    trainer.load(STATE)
    outcomes = dict.fromkeys(OUTCOMES, 0)
    for number in range(1, count + 1):
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                os._exit(OUTCOMES.index(outcome(trainer, number, least, before, after)))
            finally:
                os._exit(len(OUTCOMES))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            # TVM's runtime ends the process where its allocator notes freed memory.
            assert os.WTERMSIG(status) == signal.SIGABRT, (number, status)
            outcomes["ended"] += 1
        else:
            assert os.WEXITSTATUS(status) < len(OUTCOMES), number
            outcomes[OUTCOMES[os.WEXITSTATUS(status)]] += 1
    print(least, count, outcomes)
    return outcomes


if __name__ == "__main__":
    of_all = examine(0)
    assert of_all["before"] > 0
    assert of_all["half"] > 0
    # Tensors, whose memory comes before the first write.
    of_tensors = examine(4096)
    assert of_tensors["before"] > 5
    assert of_tensors["half"] == of_tensors["ended"] == 0
    print("each step is whole")
