"""Measure data parallel training by several workers, and compare it with a model of the network.

``python benchmarks/scaling.py`` takes about 4 minutes on two cores that do nothing else. It trains
ResNet-18, GPT and ViT-tiny with the same batch by one worker with two threads and by two workers
with one thread each: the time of a step, the bytes that a worker gives to collectives, and the
share of the communication that is hidden behind computations. Then 2, 4 and 8 workers train a small
GPT with collectives that take as long as on networks of 1, 10 and 100 Gbit/s, and the model of
``_cluster.py`` predicts these steps from those without the limit. From the recorded steps it
predicts the efficiency of up to 1,024 workers. The results are those of the page
``docs/distributed.md``: ``--out docs/_measured/scaling.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from pathlib import Path

from _cluster import NETWORKS, Network, efficiency, fitted, replayed, seconds_of

NAMES = ("ResNet-18", "GPT, 6 layers", "ViT-tiny")

#: The elements of the allreduces that the network of this machine is fitted to.
SIZES = (1, 2**10, 2**14, 2**18, 2**20, 2**22)

#: The numbers of workers on slower networks, and those of predictions.
MEASURED, PREDICTED = (2, 4, 8), (8, 16, 32, 64, 128, 256, 512, 1024)

#: The largest bucket of the small GPT, whose gradients have 18 MB.
BUCKET_BYTES = 4 * 2**20


def main() -> int:
    args = _parser().parse_args()
    from measure import _limit_threads, processor

    _limit_threads(2)
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    import torch
    import tvm
    from _models import STEPS

    from relax_grad.distributed import session

    measured = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "tvm": tvm.__version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "busy": _busy(),
        "networks": {name: list(network) for name, network in NETWORKS.items()},
        "steps": [],
        "throttled": [],
    }
    executables: dict = {}
    for count in args.workers:
        with session(count, threads=1) as workers:
            workers.import_python_module("_slow_network")
            host = _host(workers, args)
            if count == 2:
                measured["host"], measured["overhead"] = list(host), _overhead(workers, args)
                steps = [step for step in STEPS if step.name.startswith(NAMES)]
                for step in steps:
                    if (args.only or "") in step.name:
                        measured["steps"].append(_step(step, workers, args))
                        _predict(measured["steps"][-1], measured)
            measured["throttled"] += _throttled(workers, host, executables, args)
    errors = [row["predicted_ms"] / row["ms"] - 1 for row in measured["throttled"]]
    print(f"the largest error of the model is {max(map(abs, errors)):.1%}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(_text(measured))
    print(f"written to {args.out}")
    return 0


def _busy(seconds: float = 3.0) -> float:
    """Return the share of the processors that other programs take now, or 0 where the system does
    not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0

    def ticks() -> tuple[int, int]:
        own = [int(count) for count in stat.read_text().splitlines()[0].split()[1:]]
        return sum(own), own[3] + own[4]  # idle, and idle in wait for disks

    before = ticks()
    time.sleep(seconds)
    total, idle = (b - a for a, b in zip(before, ticks(), strict=True))
    return round(1 - idle / total, 3)


def _step(step, workers, args) -> dict:
    """Return the times of a step by one worker with two threads, and by two with one each, measured
    in turn."""
    import _steps

    from relax_grad.distributed import data_parallel
    from relax_grad.frontend.torch import from_module
    from relax_grad.training import SGD, Trainer, train_step

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
    row = {
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
    print(json.dumps({k: v for k, v in row.items() if k != "events"}), flush=True)
    return row


def _predict(row: dict, measured: dict) -> None:
    """Add the efficiencies of many workers to a row."""
    row["efficiency"] = {
        name: {
            str(workers): efficiency(row["events"], 2, workers, network, measured["overhead"])
            for workers in PREDICTED
        }
        for name, network in NETWORKS.items()
    }


def _throttled(workers, host: Network, executables: dict, args) -> list[dict]:
    """Return the measured and the predicted times of steps on slower networks."""
    import numpy as np
    import torch
    from _models import GPT

    from relax_grad.distributed import data_parallel
    from relax_grad.distributed.trainer import DataParallelTrainer
    from relax_grad.frontend.torch import from_module
    from relax_grad.training import SGD, train_step

    torch.manual_seed(0)
    tokens = torch.zeros(args.share, 64, dtype=torch.int64)
    network = GPT(words=1024, length=64, width=288, depth=4)
    step = train_step(from_module(network, (tokens, tokens)), SGD(lr=0.01))
    # The step of a worker is the same in all sessions, and is compiled once.
    compiled = DataParallelTrainer._compiled
    if executables:
        DataParallelTrainer._compiled = lambda self, step: executables["gpt"]
    try:
        trainer = data_parallel(step, workers, check_every=0, bucket_bytes=BUCKET_BYTES)
    finally:
        DataParallelTrainer._compiled = compiled
    executables["gpt"] = trainer._executable
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
    rows = []
    for name, limit in limits.items():
        rows.append(
            {
                "workers": count,
                "network": name,
                "ms": statistics.median(times[name]) * 1e3,
                "predicted_ms": (rest + replayed(timeline, cost_of(limit))) * 1e3,
                "hidden": statistics.median(hidden[name]),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


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


def _host(workers, args) -> Network:
    """Return the network that allreduces on this machine are like."""
    times = [
        max(workers.run("time_allreduce", elements=size, repeats=args.repeats)) for size in SIZES
    ]
    return fitted(workers.num_workers, [4 * size for size in SIZES], times)


def _overhead(workers, args) -> float:
    """Return the seconds of an allreduce of one element."""
    return min(workers.run("time_allreduce", elements=1, repeats=10 * args.repeats))


def _text(measured: dict) -> str:
    """Return the file: a line for each event and each row."""
    text = json.dumps(measured, indent=1)
    lines, depth = [], 0
    for line in text.splitlines():
        stripped = line.strip()
        if depth:
            lines[-1] += stripped if stripped.startswith("]") else f"{stripped} "
            depth += stripped.count("[") - stripped.count("]")
            continue
        lines.append(line)
        if line.startswith("    [") and line.endswith("["):
            depth = 1
    return "\n".join(line.replace(" ],", "],").rstrip() for line in lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers",
        type=int,
        nargs="*",
        default=list(MEASURED),
        help="the numbers of workers (default 2 4 8)",
    )
    parser.add_argument("--repeats", type=int, default=8, help="steps of a time (default 8)")
    parser.add_argument("--share", type=int, default=4, help="texts of a worker (default 4)")
    parser.add_argument("--only", help="only steps whose names contain this text")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results" / "scaling.json",
        help="the file (default benchmarks/results/scaling.json)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
