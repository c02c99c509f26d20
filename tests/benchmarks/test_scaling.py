"""The model of the network in benchmarks/scaling.py."""

from __future__ import annotations

import pytest
from scaling import SIZES, fitted, seconds_of


def test_the_model():
    """A ring of 4 workers: 6 messages, each of a quarter of the bytes."""
    assert seconds_of(4, [8000], 1e-3, 1e6) == pytest.approx(6 * (1e-3 + 2e-3))
    assert seconds_of(1, [8000], 1e-3, 1e6) == 0


@pytest.mark.parametrize("workers", [2, 8])
def test_the_fit_finds_latency_and_bandwidth(workers):
    sizes = [4 * each for each in SIZES]
    seconds = [seconds_of(workers, [size], 5e-5, 1.25e9) for size in sizes]
    latency, bandwidth = fitted(workers, sizes, seconds)
    assert latency == pytest.approx(5e-5, rel=1e-6)
    assert bandwidth == pytest.approx(1.25e9, rel=1e-6)
