"""The model of the network in benchmarks/_cluster.py, and the measurements of the page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra 'bench' is missing: no torch")

from _cluster import NETWORKS, Network, computation, efficiency, fitted, replayed, seconds_of
from scaling import MEASURED, PREDICTED, SIZES

PAGE = Path(__file__).parents[2] / "docs" / "_measured" / "scaling.json"


def test_collectives():
    """A ring of 4 workers: 6 messages, each of a quarter of the bytes; a tree of 5: 3 messages of
    all bytes."""
    network = Network(1e-3, 1e6)
    assert seconds_of("allreduce", 8000, 4, network) == pytest.approx(6 * (1e-3 + 2e-3))
    assert seconds_of("broadcast", 8000, 5, network) == pytest.approx(3 * (1e-3 + 8e-3))
    assert seconds_of("send", 8000, 4, network) == pytest.approx(1e-3 + 8e-3)
    assert seconds_of("recv_from_worker0", 8000, 4, network) == 0
    assert seconds_of("allreduce", 8000, 1, network) == 0


@pytest.mark.parametrize("workers", [2, 8])
def test_the_fit_finds_latency_and_bandwidth(workers):
    sizes = [4 * size for size in SIZES]
    network = Network(5e-5, 1.25e9)
    seconds = [seconds_of("allreduce", size, workers, network) for size in sizes]
    assert fitted(workers, sizes, seconds) == pytest.approx(network, rel=1e-6)


#: A share of the batch is sent, two buckets are started, and the loss is reduced before the workers
#: wait for them.
EVENTS = [
    ["send", 100, 1.0, 0.0],
    ["start", 1000, 4.0, 0.5],
    ["start", 2000, 2.0, 0.5],
    ["allreduce", 4, 1.0, 0.0],
    ["wait", 0, 0.0, 0.25],
    ["wait", 0, 0.0, 0.25],
    ["end", 0, 3.0, 0.0],
]


def replay_of(seconds: dict[int, float], **options) -> float:
    return replayed(EVENTS, lambda name, size: seconds.get(size, 0.0), **options)


def test_a_step_is_replayed():
    """Buckets run beside computations, one after the other, and before the loss."""
    assert replay_of({}) == 12.5
    assert replay_of({}, sends=3) == 14.5
    assert replay_of({100: 2.0}) == 14.5
    assert (
        replay_of({1000: 3.0}) == 12.5
    )  # hidden: 2.5 seconds until the next start, and 1.5 until the loss
    assert replay_of({1000: 4.0, 4: 1.0}) == 13.5
    # The first bucket begins at 5, the second one at 15, and the loss at 16.
    assert replay_of({1000: 10.0, 2000: 1.0, 4: 0.5}) == 5 + 10 + 1 + 0.5 + 0.5 + 3
    # The second wait takes as long as the network.
    assert replay_of({2000: 100.0}) == 7.5 + 100 + 0.25 + 3
    assert computation(EVENTS) == 10


def test_efficiency():
    fast, slow = Network(0.0, math.inf), Network(1.0, 1e9)
    assert efficiency(EVENTS, 2, 2, fast, 0.0) == pytest.approx(10 / 12.5)
    efficiencies = [efficiency(EVENTS, 2, workers, slow, 0.1) for workers in (2, 8, 64)]
    assert sorted(efficiencies, reverse=True) == efficiencies
    assert efficiencies[-1] < 0.1


def test_the_page():
    """Predictions are those of the model for the recorded steps, and within 15 % of the steps on
    slower networks.

    On a machine with other programs, steps take longer than others by chance.
    """
    measured = json.loads(PAGE.read_text("utf-8"))
    assert {name: Network(*numbers) for name, numbers in measured["networks"].items()} == NETWORKS
    assert [step["name"].partition(",")[0] for step in measured["steps"]] == [
        "ResNet-18",
        "GPT",
        "ViT-tiny",
    ]
    for step in measured["steps"]:
        assert step["two_workers_ms"] > 0
        assert 0 <= step["hidden"] <= 1
        for name, network in NETWORKS.items():
            for count in PREDICTED:
                wanted = efficiency(step["events"], 2, count, network, measured["overhead"])
                assert step["efficiency"][name][str(count)] == pytest.approx(wanted)
    rows = {(row["workers"], row["network"]): row for row in measured["throttled"]}
    assert set(rows) == {(w, n) for w in MEASURED for n in ("this machine", *NETWORKS)}
    limit = 0.15 if measured["busy"] < 0.1 else 0.5
    for row in rows.values():
        assert row["predicted_ms"] == pytest.approx(row["ms"], rel=limit), row
