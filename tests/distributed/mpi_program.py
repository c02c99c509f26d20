"""A program for ``mpiexec``: the first process begins a session of all, and writes what it has
found as JSON.

``python mpi_program.py checks WORKERS`` runs collectives and training, ``fails`` a worker that
raises an error in a call, and ``measured WORKERS FOLDER`` a function of ``worker_matrix``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from sessions import scatter, values
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.distributed import WorkerError, column, data_parallel, row, session
from relax_grad.training import SGD, Trainer, train_step


def linear():
    """Return a step with a divided layer and a symbolic batch, values, and batches."""
    n = tirx.Var("n", "int64")
    shapes = {"x": (n, 3), "up": (3, 4), "down": (4, 2)}
    x, up, down = (relax.Var(k, relax.TensorType(v, "float64")) for k, v in shapes.items())
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, up, down]):
        y = bb.emit(op.matmul(bb.emit(op.tanh(bb.emit(op.matmul(x, up)))), down))
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.square(y)))))
    rng = np.random.default_rng(0)
    start = {"up": rng.normal(size=(3, 4)), "down": rng.normal(size=(4, 2))}
    step = train_step(bb.get(), SGD(lr=0.1, momentum=0.9), wrt=["up", "down"])
    return step, start, [rng.normal(size=(count, 3)) for count in (9, 8, 11)]


def reductions(workers) -> dict[str, float]:
    """Return the largest error of reductions by their dtypes."""
    differences, rng, count = {}, np.random.default_rng(1), workers.num_workers
    for dtype in ("float32", "float16", "int16", "int64"):
        inputs = rng.integers(-9, 9, (count, 5)).astype(dtype)
        for kind, wanted in (("sum", inputs.sum(0)), ("max", inputs.max(0)), ("avg", None)):
            wanted = inputs.astype("float64").mean(0).astype(dtype) if wanted is None else wanted
            result = workers.empty((5,), dtype)
            workers.allreduce(scatter(workers, list(inputs)), result, kind, False)
            errors = [np.abs(e - wanted).max() for e in values(workers, result)]
            differences[f"{kind} {dtype}"] = float(max(errors))
    return differences


def moves(workers) -> dict[str, bool]:
    """Return whether tensors arrive."""
    count = workers.num_workers
    rows = np.arange(3.0 * count).reshape(count, 3)
    whole, part = workers.empty((count, 3), "float64"), workers.empty((3,), "float64")
    workers.allgather(scatter(workers, list(rows)), whole, False)
    right = {"allgather": all(np.array_equal(e, rows) for e in values(workers, whole))}
    at_first = workers.empty((count, 3), "float64", None, True, False)
    workers.gather_to_worker0(scatter(workers, list(rows)), at_first, False)
    right["gather"] = np.array_equal(workers.debug(at_first, 0).numpy(), rows)
    workers.scatter_from_worker0(at_first, part, False)
    right["scatter"] = all(
        np.array_equal(e, w) for e, w in zip(values(workers, part), rows, strict=True)
    )
    workers.import_python_module("worker_tasks")
    right["send"] = workers.run("send_and_recv", count=5)[:2] == [[5.0] * 5] * 2
    return right


def training(workers) -> list[float]:
    """Return the largest differences of parameters from those of one worker, with and without
    overlap."""
    step, start, batches = linear()
    single = Trainer(step, values=start)
    options: dict = {"values": start, "check_every": 1, "bucket_bytes": 64}
    if workers.num_groups > 1:
        options["shards"] = {"up": column(), "down": row()}
    trainers = [
        data_parallel(step, workers, overlap=overlap, **options) for overlap in (True, False)
    ]
    for batch in batches:
        for trainer in (single, *trainers):
            trainer.step(batch)
    return [
        max(np.abs(trainer.params[k].numpy() - single.params[k].numpy()).max() for k in start)
        for trainer in trainers
    ]


def main(task: str, count: int, folder: str = "") -> None:
    if folder:
        import worker_matrix

        with session(count, "mpi", threads=1, timeout=60) as workers:
            print(json.dumps(getattr(worker_matrix, task)(workers, Path(folder))), flush=True)
        return
    if task == "fails":
        workers = session(count, "mpi", threads=1, timeout=20)
        print(json.dumps(workers.pids), flush=True)
        try:
            workers.run("no such task")
        except WorkerError as error:
            print(json.dumps({"rank": error.rank, "cause": error.cause}), flush=True)
        return
    if task == "is killed":
        workers = session(count, "mpi", threads=1, timeout=20)
        print(json.dumps(workers.pids), flush=True)
        os.kill(workers.pids[1], 9)
        workers.synchronize()
    for groups in (1, 2) if count > 2 else (1,):
        with session(count, "mpi", num_groups=groups, threads=1, timeout=60) as workers:
            report = {
                "reductions": reductions(workers),
                "moves": moves(workers),
                "training": training(workers),
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
