"""Minimum cuts, compared with all cuts of small random networks."""

from __future__ import annotations

import itertools

import numpy as np

from relax_grad.cpu.passes.remat._min_cut import UNBOUNDED, Network

NODES = 6


def capacity(edges, on_sink_side) -> int:
    return sum(c for a, b, c in edges if not on_sink_side[a] and on_sink_side[b])


def cuts():
    """Yield all divisions of the nodes with the source, node 0, on one side and the sink, node 1,
    on the other."""
    for others in itertools.product([False, True], repeat=NODES - 2):
        yield [False, True, *others]


def test_random_networks():
    rng = np.random.default_rng(0)
    for _ in range(200):
        count = int(rng.integers(0, 16))
        ends = [tuple(map(int, rng.integers(0, NODES, 2))) for _ in range(count)]
        edges = [(a, b, int(rng.integers(0, 5))) for a, b in ends if a != b]
        network = Network(NODES)
        for edge in edges:
            network.connect(*edge)
        side = network.sink_side(0, 1)
        least = min(capacity(edges, cut) for cut in cuts())
        fewest = min(sum(cut) for cut in cuts() if capacity(edges, cut) == least)
        assert not side[0]
        assert side[1]
        assert (capacity(edges, side), sum(side)) == (least, fewest)


def test_a_long_chain_with_unbounded_edges():
    count = 20_000
    network = Network(count)
    for i in range(2, count - 1):
        network.connect(i, i + 1, UNBOUNDED if i % 3 else 7 + (i != 9999))
    network.connect(0, 2, UNBOUNDED)
    network.connect(count - 1, 1, UNBOUNDED)
    side = network.sink_side(0, 1)
    assert not side[9999]
    assert side[10_000]
    assert sum(side) == count - 9999 + 0
