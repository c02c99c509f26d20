"""Timing of functions in turn, so that a slow period of the machine affects all of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from _cores import Apart, bound

#: The least duration of a sample in seconds; a sample calls short functions several times.
_SHORTEST = 5e-3

#: Seconds of a pause before the calls of a function. The threads of PyTorch spin for some
#: milliseconds after an operation. If those of TVM start meanwhile, on the processor that is left,
#: they may stay there together for longer than a sample, since they yield to each other.
_PAUSE = 12e-3

#: Seconds of unmeasured calls before a sample.
_UNMEASURED = 20e-3

#: Longer functions, in seconds, have no unmeasured calls: some milliseconds do not affect their
#: samples.
_LONG = 0.2


def measure(
    functions: Mapping[str, Callable[[], object]],
    repeats: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    threads: int = 1,
    *,
    binds: bool = False,
) -> dict[str, list[float]]:
    """Return samples of the time of a call of each function, in seconds.

    The functions take turns. Unmeasured calls precede each sample.

    Parameters
    ----------
    functions : Mapping[str, Callable]
        The functions, by name.
    repeats : int
        The number of samples of each function.
    seconds : float
        The time limit; at least 3 samples are taken.
    clock : Callable
        The clock of the samples; ``time.thread_time`` for functions of one thread on a machine that
        is not idle.
    threads : int
        The threads of each function. If they share a core meanwhile, a round of samples is taken
        again: see :mod:`_cores`.
    binds : bool
        Whether to bind the calling thread and all others, which are the second ones of libraries
        that compute in the calling thread too, to processors of their own.
    """
    times = {name: _time_of(function) for name, function in functions.items()}
    calls = {name: max(1, int(_SHORTEST / max(spent, 1e-7))) for name, spent in times.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    apart = Apart(threads)
    spent, taken = 0.0, 0
    while functions and taken < repeats and (taken < 3 or spent < seconds):
        apart.wait()
        start = time.perf_counter()
        # The order changes, because a function may find the caches as the one before left them.
        order = list(functions) if taken % 2 == 0 else list(reversed(functions))
        with bound(threads) if binds else contextlib.nullcontext():
            found = {
                name: _sample(functions[name], times[name], calls[name], clock) for name in order
            }
        duration = time.perf_counter() - start
        if not apart.holds():
            apart.lose(duration)
            continue
        for name, sample in found.items():
            samples[name].append(sample)
        spent, taken = spent + duration, taken + 1
    return samples


def _sample(
    function: Callable[[], object], spent: float, calls: int, clock: Callable[[], float]
) -> float:
    """Return the time of a call, in the mean of some, after unmeasured ones.

    A result lives until the next call returns, as in a loop with ``y = f(x)``: TVM's virtual
    machine refers to its last result until then, while another framework would write each result
    to the memory of the one before, which is still in the caches.
    """
    _kept: object = None
    time.sleep(_PAUSE)
    start = time.perf_counter()
    while spent < _LONG and time.perf_counter() - start < _UNMEASURED:
        _kept = function()
    start = clock()
    for _ in range(calls):
        _kept = function()
    return (clock() - start) / calls


def _time_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    spent = time.perf_counter() - start
    if spent > _LONG:
        return spent
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
