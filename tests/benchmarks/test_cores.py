"""Measurements leave out the samples of threads that share a core."""

from __future__ import annotations

import shutil
import threading
import time

import pytest
from _cores import Apart, _round_trip, are_apart, are_near
from _timing import measure


def test_threads_that_take_turns_share_a_core():
    """A core is a lock here: a thread that holds it computes, and the other one waits."""
    core = threading.Lock()

    def alone(rounds: int) -> float:
        time.sleep(2e-3)
        return rounds

    def shared(rounds: int) -> float:
        with core:
            return alone(rounds)

    assert are_apart(2, alone)
    assert not are_apart(2, shared)
    assert are_apart(1, shared)


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
