"""Measurements leave out the samples of threads that share a core."""

from __future__ import annotations

import os
import shutil
import threading
import time

import pytest
from _cores import _PROCESSORS, Apart, _rate, _round_trip, are_apart, are_near, bound
from _timing import measure


def test_threads_that_share_a_core():
    """Threads that share a core have the rate of one together."""
    assert are_apart(2, lambda threads: 100.0 * threads)
    assert not are_apart(2, lambda threads: 100.0)
    assert are_apart(1, lambda threads: 100.0)


def test_one_probe_of_some_is_enough():
    """Others may have met a thread that still spins."""
    rates = iter([100.0, 100.0, 190.0, 100.0])
    assert are_apart(2, lambda threads: next(rates))


def test_the_rate_of_threads_is_that_of_all_at_once():
    """Each thread waits within its work for the other one, so both are there at once."""
    meeting = threading.Barrier(2, timeout=60)

    def work(rounds: int) -> float:
        meeting.wait()
        time.sleep(1e-3)
        return rounds

    assert 0 < _rate(work, 2, 1000) <= 2 * 1000 / 1e-3 / 1e9


def test_far_cores():
    """One quick trip of some is enough: others may have met an interrupt."""
    assert are_near(2, iter([430.0, 90.0]).__next__)
    assert not are_near(2, lambda: 430.0)
    assert are_near(1, lambda: 430.0)


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler: nothing is measured")
def test_a_trip_of_a_cache_line():
    assert 5 < _round_trip() < 1e7


def test_rounds_on_a_shared_core_are_taken_again(monkeypatch):
    states = iter([True, True, True, False, False, True, True, *[True] * 20])
    calls, counted = [], []
    monkeypatch.setattr("_timing.Apart", lambda threads: Apart(threads, lambda _: next(states)))
    clock = iter(range(1000))

    def tick() -> float:
        counted.append(len(calls))
        return float(next(clock))

    samples = measure({"a": lambda: calls.append("a")}, 3, 10.0, tick, threads=2)
    # The first round counts; then the probe after the second one, and the one before the third one,
    # fail: four rounds give three samples.
    assert len(samples["a"]) == 3
    assert len(counted) == 8


def test_a_measurement_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(Apart, "left_of_all", 100.0)
    apart = Apart(2, lambda _: False, patience=0.05)
    start = time.perf_counter()
    with pytest.warns(UserWarning, match="2 threads shared a core"):
        apart.wait()
    assert time.perf_counter() - start < 5
    assert apart.holds()
    assert Apart.left_of_all < 100


def test_a_process_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(Apart, "left_of_all", 0.0)
    assert Apart(2, lambda _: False).holds()


@pytest.mark.skipif(len(_PROCESSORS) < 2, reason="one processor, or not Linux")
def test_threads_are_bound_for_a_measurement():
    """The calling thread has one processor, and the others have another one, until the end."""
    ready, done, other = threading.Event(), threading.Event(), []

    def wait() -> None:
        other.append(threading.get_native_id())
        ready.set()
        done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    try:
        with bound(2):
            own = os.sched_getaffinity(0)
            theirs = os.sched_getaffinity(other[0])
        assert len(own) == len(theirs) == 1
        assert own != theirs
        for threads in (1, 3):
            with bound(threads):
                assert sorted(os.sched_getaffinity(0)) == _PROCESSORS
        assert sorted(os.sched_getaffinity(other[0])) == _PROCESSORS
    finally:
        done.set()
        thread.join()
