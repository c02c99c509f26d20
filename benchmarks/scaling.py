"""Data parallel training beside a model of the network, for docs/distributed.md.

It takes about 4 minutes on two cores that do nothing else. ResNet-18, GPT and ViT-tiny train with
the same batch by one worker with two threads and by two workers with one thread each: the time of a
step, the bytes that a worker gives to collectives, and the share of the communication that is
hidden behind computations. Then 2, 4 and 8 workers train a small GPT with collectives that take as
long as on networks of 1, 10 and 100 Gbit/s, and the model of ``_cluster.py`` predicts these steps
from those without the limit. From the recorded steps it predicts the efficiency of up to 1,024
workers.
"""

from __future__ import annotations

import os
import statistics
import time
from argparse import Namespace

import _steps
import numpy as np
import torch
from _benchmark import HERE, Benchmark, Layout, Rows, beginning, facts
from _cluster import NETWORKS, Network, efficiency, fitted, replayed, seconds_of
from _models import GPT, STEPS, Step

from relax_grad.distributed import data_parallel, session
from relax_grad.distributed.trainer import DataParallelTrainer
from relax_grad.frontend.torch import from_module
from relax_grad.training import SGD, Trainer, train_step

NAMES = ("ResNet-18", "GPT, 6 layers", "ViT-tiny")

#: The elements of the allreduces that the network of this machine is fitted to.
SIZES = (1, 2**10, 2**14, 2**18, 2**20, 2**22)

#: The numbers of workers on slower networks, and those of predictions.
MEASURED, PREDICTED = (2, 4, 8), (8, 16, 32, 64, 128, 256, 512, 1024)

#: The largest bucket of the small GPT, whose gradients have 18 MB.
BUCKET_BYTES = 4 * 2**20


def measured(count: int, args: Namespace) -> dict:
    """Return the figures of a number of workers: for two of them, those of whole steps too."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    found: dict = {}
    with session(count, threads=1) as workers:
        workers.import_python_module("_slow_network")
        host = _host(workers, args)
        if count == 2:
            found = {"host": list(host), "overhead": _overhead(workers, args)}
            chosen = beginning(NAMES, {step.name: step for step in STEPS}).values()
            found["steps"] = [_step(step, workers, args) for step in chosen]
            for step in found["steps"]:
                step["efficiency"] = _efficiencies(step["events"], found["overhead"])
        found["throttled"] = _throttled(workers, host, args)
    return found


def _packed(head: dict, rows: Rows) -> dict:
    together = {"steps": [], **head, "throttled": []}
    for row in rows.values():
        together["throttled"] = together["throttled"] + row["throttled"]
        together.update({key: value for key, value in row.items() if key != "throttled"})
    return together


def _errors(rows: Rows) -> str:
    throttled = [row for own in rows.values() for row in own["throttled"]]
    largest = max(abs(row["predicted_ms"] / row["ms"] - 1) for row in throttled)
    return f"the largest error of the model is {largest:.1%}"


def _step(step: Step, workers, args: Namespace) -> dict:
    """Return the times of a step by one worker with two threads, and by two with one each, measured
    in turn."""
    network, inputs = _steps.initial(step)
    share = tuple(array[: len(inputs[0]) // 2] for array in inputs)
    optimizer = SGD(lr=_steps.RATE)
    single = Trainer(train_step(from_module(network, inputs), optimizer))
    made = train_step(from_module(network, share), optimizer)
    parallel = data_parallel(made, workers, check_every=0, batch_norm="local")
    batch = [array.numpy() for array in inputs]
    times: list[list[float]] = [[], []]
    for trainer in (single, parallel):
        trainer.step(*batch)
    workers.run("record")
    spans, communication = [], []
    for _ in range(args.repeats):
        for trainer, own in zip((single, parallel), times, strict=True):
            begin = time.perf_counter()
            trainer.step(*batch)
            own.append(time.perf_counter() - begin)
            if trainer is parallel:
                spans.append((begin, begin + own[-1]))
                communication.append(parallel.communication)
    events = _timeline(workers.run("recorded")[0], spans)
    seconds = statistics.median(e.seconds for traffic in communication for e in traffic)
    waited = statistics.median(e.waited for traffic in communication for e in traffic)
    whole, both = map(statistics.median, times)
    return {
        "name": step.name,
        "one_worker_ms": whole * 1e3,
        "two_workers_ms": both * 1e3,
        "ratio": statistics.median(b / a for a, b in zip(*times, strict=True)),
        "megabytes": communication[-1][1].sent / 1e6,
        "communication_ms": seconds * 1e3,
        "waited_ms": waited * 1e3,
        "hidden": 1 - waited / seconds,
        "events": events,
    }


def _efficiencies(events: list, overhead: float) -> dict[str, dict[str, float]]:
    """Return the efficiencies of many workers, by network."""
    return {
        name: {str(count): efficiency(events, 2, count, network, overhead) for count in PREDICTED}
        for name, network in NETWORKS.items()
    }


#: The step of a worker is the same in all sessions, and is compiled once.
_executables: dict = {}


def _throttled(workers, host: Network, args: Namespace) -> list[dict]:
    """Return the measured and the predicted times of steps on slower networks."""
    torch.manual_seed(0)
    tokens = torch.zeros(args.share, 64, dtype=torch.int64)
    network = GPT(words=1024, length=64, width=288, depth=4)
    step = train_step(from_module(network, (tokens, tokens)), SGD(lr=0.01))
    compiled = DataParallelTrainer._compiled
    if _executables:
        DataParallelTrainer._compiled = lambda self, step: _executables["gpt"]
    try:
        trainer = data_parallel(step, workers, check_every=0, bucket_bytes=BUCKET_BYTES)
    finally:
        DataParallelTrainer._compiled = compiled
    _executables["gpt"] = trainer._executable
    count = workers.num_workers
    rng = np.random.default_rng(0)
    batch = [rng.integers(0, 1024, (args.share * count, 64)) for _ in range(2)]

    def cost_of(limit: Network | None):
        def cost(name: str, size: int) -> float:
            own = seconds_of(name, size, count, host)
            return own if limit is None else max(own, seconds_of(name, size, count, limit))

        return cost

    limits = {"this machine": None, **NETWORKS}
    times = {name: [] for name in limits}
    hidden = {name: [] for name in limits}
    spans, events = [], []
    for i in range(args.repeats + 1):  # in turn, and the first round does not count
        order = [*limits.items()]
        for name, limit in order[i % len(order) :] + order[: i % len(order)]:
            latency, bandwidth = limit or (0.0, 0.0)
            workers.run("slow_down", latency=latency, bandwidth=bandwidth)
            if limit is None:
                workers.run("record")
            begin = time.perf_counter()
            trainer.step(*batch)
            end = time.perf_counter()
            recorded = workers.run("recorded")[0] or []
            if i:
                events += recorded
                spans += [(begin, end)] if limit is None else []
                times[name].append(end - begin)
                hidden[name].append(statistics.mean(e.hidden for e in trainer.communication))
    workers.run("slow_down", latency=0.0, bandwidth=0.0)
    timeline = _timeline(events, spans)
    # The part of a step that the events do not tell: workers that wait for each other.
    rest = statistics.median(times["this machine"]) - replayed(timeline, cost_of(None))
    return [
        {
            "workers": count,
            "network": name,
            "ms": statistics.median(times[name]) * 1e3,
            "predicted_ms": (rest + replayed(timeline, cost_of(limit))) * 1e3,
            "hidden": statistics.median(hidden[name]),
        }
        for name, limit in limits.items()
    ]


def _timeline(events: list, spans: list[tuple[float, float]]) -> list[list]:
    """Return the events of a step with the median times of all recorded steps."""
    steps = []
    for begin, end in spans:
        own = [event for event in events if begin <= event[2] <= end]
        last, rows = begin, []
        for kind, size, first, after, seconds in own:
            rows.append([kind, size, first - last, seconds])
            last = after
        steps.append([*rows, ["end", 0, end - last, 0.0]])
    assert len({len(of_step) for of_step in steps}) == 1, "the steps have different collectives"
    return [
        [same[0][0], same[0][1], *(round(statistics.median(e[i] for e in same), 7) for i in (2, 3))]
        for same in zip(*steps, strict=True)
    ]


def _host(workers, args: Namespace) -> Network:
    """Return the network that allreduces on this machine are like."""
    times = [
        max(workers.run("time_allreduce", elements=size, repeats=args.repeats)) for size in SIZES
    ]
    return fitted(workers.num_workers, [4 * size for size in SIZES], times)


def _overhead(workers, args: Namespace) -> float:
    """Return the seconds of an allreduce of one element."""
    return min(workers.run("time_allreduce", elements=1, repeats=10 * args.repeats))


BENCHMARK = Benchmark(
    rows=lambda args: {f"{count} workers": count for count in MEASURED},
    measure=measured,
    json="scaling.json",
    head=lambda args: {
        **facts("processor", "cores", "tvm", "torch", "date", "busy"),
        "networks": {name: list(network) for name, network in NETWORKS.items()},
    },
    layout=Layout(_packed),
    summary=_errors,
    repeats=8,
    options={"--share": {"type": int, "default": 4, "help": "texts of a worker (default: 4)"}},
)
