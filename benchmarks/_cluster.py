"""A model of the time of a data parallel step, of the form of LogGP (Alexandrov et al., 1995).

A message of n bytes takes ``latency + n / bandwidth``; the processor's own time for a message is
part of the latency. Collectives are sequences of messages, one after the other. A step is a
sequence of computations and collectives, as a worker has recorded it: collectives that are started
run one after the other beside the computations, until the worker waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Network(NamedTuple):
    """A network.

    Attributes
    ----------
    latency : float
        The seconds of a message without bytes.
    bandwidth : float
        Bytes a second.
    """

    latency: float
    bandwidth: float


#: Networks by name.
NETWORKS = {
    "1 Gbit/s": Network(50e-6, 1e9 / 8),
    "10 Gbit/s": Network(20e-6, 1e10 / 8),
    "100 Gbit/s": Network(5e-6, 1e11 / 8),
}

#: A kind, bytes, the seconds of computation before the event, and those of its own computation,
#: such as the copy of a bucket.
Event = Sequence

#: Takes the name of a collective and its bytes.
Cost = Callable[[str, int], float]


def seconds_of(name: str, size: int, workers: int, network: Network) -> float:
    """Return the time of a collective.

    Parameters
    ----------
    name : str
        ``"allreduce"``, a ring: 2 (W - 1) messages of n / W bytes; ``"broadcast"``, a tree;
        ``"send"``, one message; another one takes no time.
    size : int
        The bytes n.
    workers : int
        The number of workers W.
    network : Network
        The network between each two of them.
    """
    if workers == 1:
        return 0.0
    messages, share = {
        "allreduce": (2 * (workers - 1), 1 / workers),
        "broadcast": (math.ceil(math.log2(workers)), 1.0),
        "send": (1, 1.0),
    }.get(name, (0, 0.0))
    return messages * (network.latency + share * size / network.bandwidth)


def fitted(workers: int, sizes: Sequence[int], seconds: Sequence[float]) -> Network:
    """Return the network of allreduces that has the least sum of squared relative errors."""
    import numpy as np

    units = [Network(1.0, math.inf), Network(0.0, 1.0)]
    rows = [[seconds_of("allreduce", n, workers, unit) for unit in units] for n in sizes]
    rows = np.array(rows) / np.array(seconds)[:, None]
    (latency, inverse), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    return Network(max(float(latency), 0.0), 1.0 / max(float(inverse), 1e-15))


def replayed(events: Sequence[Event], cost: Cost, *, sends: float = 1.0) -> float:
    """Return the time of a step with other times of its collectives.

    Parameters
    ----------
    events : Sequence[Event]
        What worker 0 has recorded, up to an event ``"end"``. The starts and waits of buckets are in
        the same order.
    cost : Callable
        The times of collectives.
    sends : float
        The factor of the number of messages with shares of the batch.
    """
    now = free = 0.0
    pending: list[float] = []
    for kind, size, gap, own in events:
        repeats = sends if kind == "send" else 1.0
        now += gap * repeats
        if kind == "start":
            free = max(now, free) + cost("allreduce", size)
            pending.append(free)
            now += own
        elif kind == "wait":
            now = max(now, pending.pop(0)) + own
        else:
            taken = cost(kind, size) * repeats
            if taken:  # the network carries one collective at a time
                now = free = max(now, free) + taken
    return now


def computation(events: Sequence[Event]) -> float:
    """Return the time of a step without its collectives, and without the copies for them."""
    return sum(gap for kind, _, gap, _ in events if kind != "send")


def efficiency(
    events: Sequence[Event], recorded: int, workers: int, network: Network, overhead: float
) -> float:
    """Return the share of its time that a worker of many computes, with the same number of examples
    for each worker.

    Parameters
    ----------
    events : Sequence[Event]
        The events of a step.
    recorded : int
        The number of workers that recorded them.
    workers : int
        The number of workers.
    network : Network
        The network.
    overhead : float
        The seconds that the software adds to each collective.
    """

    def cost(name: str, size: int) -> float:
        seconds = seconds_of(name, size, workers, network)
        return seconds + overhead if seconds else 0.0

    sends = (workers - 1) / (recorded - 1)
    return computation(events) / replayed(events, cost, sends=sends)
