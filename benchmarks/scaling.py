"""Measure data parallel training by several workers, and compare it with a model of the network.

``python benchmarks/scaling.py`` trains ResNet-18, GPT and ViT-tiny with the same batch by one worker with all threads and by
workers with one thread each: the time of a step, the bytes that a worker gives to collectives, and the share of time in them. It
repeats the latter with collectives that take as long as on networks of 1, 10 and 100 Gbit/s. The model is fitted to allreduces of
several sizes alone, and predicts the steps. It writes scaling.json to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

NAMES = ("ResNet-18", "GPT", "ViT-tiny")

#: Networks by name: the bandwidth in bytes a second, and the latency in seconds.
NETWORKS = {
    "1 Gbit/s": (1e9 / 8, 50e-6),
    "10 Gbit/s": (1e10 / 8, 20e-6),
    "100 Gbit/s": (1e11 / 8, 5e-6),
}

#: The elements of the allreduces that the model is fitted to.
SIZES = (1, 2**10, 2**14, 2**18, 2**20, 2**22)

#: The numbers of workers that the model predicts.
PREDICTED = (8, 16, 32, 64, 128, 256, 512, 1024)


def seconds_of(workers: int, buckets: list[int], latency: float, bandwidth: float) -> float:
    """Return the time of ring allreduces of these bytes: the communication of a step.

    Parameters
    ----------
    workers : int
        The workers of the ring.
    buckets : list[int]
        The bytes of each allreduce.
    latency, bandwidth : float
        Seconds of a message, and bytes a second.
    """
    hops = 2 * (workers - 1)
    return sum(hops * (latency + size / workers / bandwidth) for size in buckets)


def fitted(workers: int, sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return the latency and the bandwidth of the model that have the least sum of squared relative errors."""
    import numpy as np

    hops = 2 * (workers - 1)
    rows = np.array([[hops, hops * size / workers] for size in sizes], "float64")
    rows, wanted = rows / np.array(seconds)[:, None], np.ones(len(sizes))
    latency, inverse = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return max(float(latency), 0.0), 1.0 / max(float(inverse), 1e-15)


def main() -> int:
    args = _parser().parse_args()
    from measure import _limit_threads, processor

    _limit_threads(args.workers)
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    import torch
    import tvm
    from _models import STEPS

    from relax_grad.distributed import session

    about = {"processor": processor(), "workers": args.workers, "tvm": tvm.__version__}
    about["torch"] = torch.__version__
    steps = [each for each in STEPS if each.name.startswith(NAMES)]
    rows = []
    with session(args.workers, threads=1) as workers:
        workers.import_python_module("_slow_network")
        for step in steps:
            if (args.only or "") in step.name:
                rows += _measured(step, workers, args)
    if not rows:
        raise SystemExit(f"no step contains {args.only!r}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "scaling.json"
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")
    return 0


def _measured(step, workers, args: argparse.Namespace) -> list[dict]:
    """Return a row for one worker, for several, and for each slower network, and print them."""
    import _steps

    from relax_grad.distributed import data_parallel
    from relax_grad.frontend.torch import from_module
    from relax_grad.training import SGD, Trainer, train_step

    network, inputs = _steps.initial(step)
    count = len(inputs[0])
    share = tuple(each[: count // args.workers] for each in inputs)
    optimizer = SGD(lr=_steps.RATE)
    one = Trainer(train_step(from_module(network, inputs), optimizer))
    whole = _seconds(one, inputs, args)
    rows = [{"step": step.name, "network": "one worker", "ms": whole * 1e3}]
    made = train_step(from_module(network, share), optimizer)
    trainer = data_parallel(made, workers, check_every=0, batch_norm="local")
    buckets = _buckets(trainer)
    for name, (bandwidth, latency) in {"this machine": (0.0, 0.0), **NETWORKS}.items():
        workers.run("slow_down", bytes_per_second=bandwidth, latency=latency)
        timed = [max(_of_allreduce(workers, size, args)) for size in SIZES]
        fit = fitted(workers.num_workers, [4 * size for size in SIZES], timed)
        before = workers.run("describe")
        seconds = _seconds(trainer, inputs, args)
        after = workers.run("describe")
        steps = args.repeats + 1
        spent = min(b["seconds"] - a["seconds"] for a, b in zip(before, after, strict=True)) / steps
        row = {
            "step": step.name,
            "network": name,
            "ms": seconds * 1e3,
            "to_one_worker": seconds / whole,
            "in_collectives": spent / (seconds or math.inf),
            "megabytes": (after[1]["sent"] - before[1]["sent"]) / steps / 1e6,
            "latency_us": fit[0] * 1e6,
            "gigabits": fit[1] * 8e-9,
        }
        rows.append(row)
    own = rows[1]["ms"] / 1e3 - _modelled(rows[1], workers.num_workers, buckets)
    for row in rows[1:]:
        seconds = own + _modelled(row, workers.num_workers, buckets)
        row["predicted_ms"] = seconds * 1e3
        row["efficiency"] = {
            str(each): own / (own + _modelled(row, each, buckets)) for each in PREDICTED
        }
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def _modelled(row: dict, workers: int, buckets: list[int]) -> float:
    return seconds_of(workers, buckets, row["latency_us"] / 1e6, row["gigabits"] / 8e-9)


def _of_allreduce(workers, size: int, args) -> list[float]:
    return workers.run("time_allreduce", elements=size, repeats=args.repeats)


def _buckets(trainer) -> list[int]:
    """Return the bytes of the allreduces of a step."""
    import tvm

    from relax_grad.distributed.transform.buckets import reductions
    from relax_grad.ir.compat import dtype_of

    found = []
    for call in reductions(trainer.parallel_step.module["step"]):
        kind = call.args[0].ty
        count = math.prod(int(each) for each in kind.shape.values)
        found.append(count * tvm.DataType(dtype_of(kind)).bits // 8)
    return found


def _seconds(trainer, inputs, args) -> float:
    """Return the least time of a step, after one that is not counted."""
    batch = [each.numpy() for each in inputs]
    found = []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        trainer.step(*batch)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="workers (default 2)")
    parser.add_argument("--repeats", type=int, default=10, help="steps of a time (default 10)")
    parser.add_argument("--only", help="only steps whose names contain this text")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results", help="the folder of the file"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
