"""The functions that a controller runs on workers, by their names.

Arguments and results are JSON. A worker has no other way to be told to do something but these
functions and the commands of Disco, and neither unpickles anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import traceback
from collections.abc import Callable

import numpy as np
import tvm
import tvm_ffi

from . import _gloo, _mpi, _shared
from ._collectives import Communicator, register
from ._processes import NO_MEMORY, Machine

#: The functions, which take the worker first.
TASKS: dict[str, Callable] = {}

#: The workers of this process, by their threads.
_WORKERS: dict[int, Worker] = {}

#: The first parts of a long text, by the threads of the workers.
_TEXTS: dict[int, list[str]] = {}

#: What the controller gives to the worker in its process: the function that takes reports,
#: tensors by their names, and the workers of its machine.
INBOXES: dict[str, tuple[Callable[[dict], None], dict, Machine]] = {}

#: The mode of TVM's threads in which they share all processors.
_SHARE_PROCESSORS = -3


class Worker:
    """A worker of a session.

    Attributes
    ----------
    rank, num_workers : int
        Its number and the number of all workers.
    group_size : int
        The number of workers of its group.
    communicator : Communicator
        Its collectives.
    inbox : dict
        Tensors of the controller, on worker 0.
    kept : dict
        The objects that tasks keep for later ones.
    """

    def __init__(self, rank: int, num_workers: int, report: Callable[[dict], None], inbox: dict):
        self.rank, self.num_workers, self.inbox = rank, num_workers, inbox
        self._communicator: Communicator | None = None
        self.kept: dict[str, object] = {}
        self._report = report

    @property
    def communicator(self) -> Communicator:
        if self._communicator is None:
            raise RuntimeError("the worker has not started")
        return self._communicator

    @communicator.setter
    def communicator(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @property
    def group_size(self) -> int:
        return self.communicator.group.size

    def run(self, call: int, name: str, arguments: str) -> None:
        """Run a task, and report its result or its error."""
        event: dict = {"call": call, "rank": self.rank}
        communicator = self._communicator
        if communicator is None:
            self._report({**event, "error": "the worker has not started", "collective": False})
            return
        try:
            with communicator.guarded():
                event["value"] = TASKS[name](self, **json.loads(arguments))
            if communicator.failure:
                event["error"], event["collective"] = communicator.failure, True
                communicator.failure = ""
        except BaseException as error:  # it would end the process of the controller on worker 0
            event["error"] = communicator.raised or _text(error)
            event["collective"] = bool(communicator.raised)
            communicator.raised = ""
        self._report(event)


def task(function: Callable) -> Callable:
    """Register a task under its name."""
    TASKS[function.__name__] = function
    return function


def serve(
    rank: int,
    num_workers: int,
    report: Callable[[dict], None],
    host: str,
    store: str,
    machine: Machine | None = None,
) -> None:
    """Register the functions of the controller's calls in the process of one worker.

    Parameters
    ----------
    report : Callable
        Takes the report of a task.
    host, store : str
        The addresses of this machine, and of the controller's machine.
    machine : Machine, optional
        The workers of this machine that may share memory.
    """

    alone = Machine([rank], NO_MEMORY)

    def make(settings: dict) -> tuple[Worker, dict, Machine]:
        worker = Worker(rank, num_workers, report, {})
        if settings["backend"] == "mpi":
            return worker, settings, alone
        where = {**settings["store"], "host": store}
        return worker, {**settings, "host": host, "store": where}, machine or alone

    _register(make)


def serve_controller() -> None:
    """Register the functions of the controller's calls in the controller's process, for the workers
    0 of all sessions."""

    def make(settings: dict) -> tuple[Worker, dict, Machine]:
        report, inbox, machine = INBOXES[settings["token"]]
        return Worker(0, settings["num_workers"], report, inbox), settings, machine

    _register(make)


def _register(make: Callable) -> None:
    register()

    def more(text: str) -> None:
        _TEXTS.setdefault(threading.get_ident(), []).append(text)

    def whole(last: str) -> str:
        return "".join([*_TEXTS.pop(threading.get_ident(), []), last])

    def start(call: int, text: str) -> None:
        settings = json.loads(whole(text))
        worker, settings, machine = make(settings)
        _WORKERS[threading.get_ident()] = worker
        try:
            _set_threads(settings["threads"], settings["processors"].get(str(worker.rank)))
            world, group, peers = _connect(settings, worker.rank, machine)
            worker.communicator = Communicator(
                world,
                group,
                peers,
                rank=worker.rank,
                num_workers=worker.num_workers,
                num_groups=settings["num_groups"],
            )
            worker.communicator.install()
        except BaseException as error:
            failure = {"error": _text(error), "collective": True}
            worker._report({"call": call, "rank": worker.rank, **failure})
        else:
            worker._report({"call": call, "rank": worker.rank, "value": os.getpid()})

    def run(call: int, name: str, text: str) -> None:
        _WORKERS[threading.get_ident()].run(call, name, whole(text))

    tvm_ffi.register_global_func("relax_grad.distributed.more", more, override=True)
    tvm_ffi.register_global_func("relax_grad.distributed.start", start, override=True)
    tvm_ffi.register_global_func("relax_grad.distributed.run", run, override=True)


def _connect(settings: dict, rank: int, machine: Machine) -> tuple:
    """Return the transports of a worker: all workers, its group, and the workers of its place in
    other groups."""
    if settings["backend"] == "mpi":
        return _mpi.connect(settings, rank)
    if machine.memory == NO_MEMORY:
        return _gloo.connect(settings, rank)
    return _shared.connect(
        machine.memory, settings, rank, machine.ranks, lambda: _gloo.connect(settings, rank)
    )


def _set_threads(number: int, processors: list[int] | None) -> None:
    """Set the threads of TVM for the calling thread, which may be bound to the processors of
    another one."""
    if processors and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)
    configure = tvm.get_global_func("runtime.config_threadpool")
    names = [str(processor) for processor in processors or sorted(os.sched_getaffinity(0))]
    configure(_SHARE_PROCESSORS, number, names)


def _text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, AssertionError | KeyError | AttributeError):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


@task
def wait(worker: Worker) -> None:
    """Do nothing: the result says that all earlier calls have ended."""


@task
def leave(worker: Worker) -> None:
    """End the connections to other workers, and forget everything."""
    worker.communicator.close()
    worker.kept.clear()


@task
def describe(worker: Worker) -> dict:
    """Return facts of the worker."""
    return {
        "pid": os.getpid(),
        "threads": int(tvm.runtime.num_threads()),
        "sent": worker.communicator.sent,
        "seconds": worker.communicator.seconds,
        "waited": worker.communicator.waited,
    }


@task
def share_file(worker: Worker, path: str, name: str) -> str:
    """Give a file of the controller to all workers, and keep its path on each machine under a
    name."""
    import tempfile

    data = np.fromfile(path, np.uint8) if worker.rank == 0 else None
    size = np.array([0 if data is None else data.size], "int64")
    size = broadcast(worker, size)
    content = broadcast(worker, np.zeros(int(size[0]), np.uint8) if data is None else data)
    folder = tempfile.TemporaryDirectory(prefix="relax_grad_")
    own = os.path.join(folder.name, os.path.basename(path))
    content.tofile(own)
    worker.kept[f"{name}/folder"], worker.kept[name] = folder, own
    return hashlib.sha256(content.tobytes()).hexdigest()


def broadcast(worker: Worker, array: np.ndarray) -> np.ndarray:
    """Return the array of worker 0; the others give one of the same shape and dtype."""
    result = tvm.runtime.tensor(array)
    worker.communicator.call("broadcast_from_worker0", (result, False, result))
    return result.numpy()
