"""Workers that are threads of this process, with collectives in NumPy."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

REDUCTIONS = (np.sum, np.prod, np.min, np.max, np.mean)  # in the order of their numbers in TVM


class Workers:
    """A session of workers, in groups of ``group_size``. All workers run one compiled module."""

    def __init__(self, count: int, group_size: int):
        self.count, self.group_size = count, group_size
        self.barrier = threading.Barrier(count)
        self.sent = [None] * count
        self.own = threading.local()

    def functions(self) -> dict:
        return {
            "allreduce": self.allreduce,
            "allgather": self.allgather,
            "broadcast_from_worker0": self.broadcast_from_worker0,
            "scatter_from_worker0": self.scatter_from_worker0,
            "worker_id": lambda: tvm_ffi.Shape((self.own.id,)),
        }

    def exchange(self, data, in_group) -> list[np.ndarray]:
        """Return the data from every worker, or from the workers of its own group."""
        self.sent[self.own.id] = data.numpy()
        self.barrier.wait()
        sent = list(self.sent)
        self.barrier.wait()
        if not in_group:
            return sent
        first = self.own.id // self.group_size * self.group_size
        return sent[first : first + self.group_size]

    def allreduce(self, data, kind, in_group, out):
        reduce = REDUCTIONS[kind[0]]
        out.copyfrom(np.asarray(reduce(self.exchange(data, in_group), axis=0)))

    def allgather(self, data, in_group, out):
        out.copyfrom(np.concatenate(self.exchange(data, in_group)))

    def broadcast_from_worker0(self, data, in_group, out):
        out.copyfrom(self.exchange(data, in_group)[0])

    def scatter_from_worker0(self, data, in_group, out):
        out.copyfrom(self.exchange(data, in_group)[0][self.own.id])

    def run(self, executable, function: str, arguments: list[list]) -> list:
        """Run a function on every worker, each with its own arguments."""
        results, errors = [None] * self.count, []

        def work(worker):
            self.own.id = worker
            # Threads of TVM that wait for work would keep the processors from the other workers.
            tvm.get_global_func("runtime.config_threadpool")(1, 1)
            try:
                machine = relax.VirtualMachine(executable, tvm.cpu())
                results[worker] = machine[function](*map(tvm.runtime.tensor, arguments[worker]))
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return results


@contextmanager
def thread_workers():
    """Yield a maker of sessions, whose collectives replace the runtime's until the context ends."""
    replaced = {}

    def start(count, group_size=None):
        workers = Workers(count, group_size or count)
        for name, function in workers.functions().items():
            name = f"runtime.disco.{name}"
            replaced.setdefault(name, tvm.get_global_func(name))
            tvm_ffi.register_global_func(name, function, override=True)
        return workers

    yield start
    for name, function in replaced.items():
        tvm_ffi.register_global_func(name, function, override=True)
