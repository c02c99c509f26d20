"""Time functions in turn, so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping

#: A sample lasts at least this long, in seconds, by calling the function several times.
_SHORTEST = 5e-3

#: As long is the function called before its sample: the threads of the one before spin for some milliseconds.
_UNMEASURED = 20e-3

#: What takes longer than this, in seconds, is not called before its sample: some milliseconds do not matter.
_LONG = 0.2


def raise_mmap_threshold() -> None:
    """Let glibc serve large tensors from its heap.

    It maps them into fresh pages, which cost more than what is measured, until it has freed some that
    were about as large as it will ever do this for.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    for _ in range(3):
        libc.free(libc.malloc(ctypes.c_size_t(31 << 20)))


def measure(
    functions: Mapping[str, Callable[[], object]], repeats: int, seconds: float
) -> dict[str, list[float]]:
    """Return samples of the time of a call for each function, in seconds.

    The functions take turns. Each is called for some time, unmeasured, before its sample.

    Parameters
    ----------
    functions : Mapping[str, Callable]
        The functions, by name.
    repeats : int
        How many samples to take of each.
    seconds : float
        Stop before that, with at least 3 samples, where it takes longer.
    """
    times = {name: _time_of(function) for name, function in functions.items()}
    calls = {name: max(1, int(_SHORTEST / max(spent, 1e-7))) for name, spent in times.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    begin = time.perf_counter()
    for i in range(repeats):
        if i >= 3 and time.perf_counter() - begin > seconds:
            break
        for name, function in functions.items():
            start = time.perf_counter()
            while times[name] < _LONG and time.perf_counter() - start < _UNMEASURED:
                function()
            start = time.perf_counter()
            for _ in range(calls[name]):
                function()
            samples[name].append((time.perf_counter() - start) / calls[name])
    return samples


def _time_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    spent = time.perf_counter() - start
    if spent > _LONG:
        return spent
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
