"""Transport between processes by MPI, with the package mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from ._arrays import REDUCED_IN, divide, viewed
from ._reduction import Reduction

if TYPE_CHECKING:
    from mpi4py import MPI


class _Work:
    """A reduction in another thread, with the methods of the work of gloo."""

    def __init__(self, future: Future):
        self._future = future

    def get_future(self) -> Future:
        return self._future

    def wait(self) -> None:
        self._future.result()


class Mpi:
    """The processes of a communicator of MPI.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm
        The communicator, which nothing else uses.
    """

    def __init__(self, communicator: MPI.Comm):
        self._communicator = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        # MPI moves the bytes of an operation only within calls: the calls of started
        # reductions are in this thread.
        self._beside = communicator.Dup() if self.size > 1 else None
        self._thread: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the thread. Communicators live as long as the processes."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def allreduce(self, sends: Sequence, kind: str, recvs: Sequence) -> None:
        """Write the reduced tensors to ``recvs``."""
        own, finish = self._prepared(sends, kind, recvs)
        if self.size > 1:
            _reduce(self._communicator, own, kind)
        finish()

    def start_allreduce(self, sends: Sequence, kind: str, recvs: Sequence) -> Reduction:
        """Start to write the reduced tensors to ``recvs``, and return the reduction. ``sends`` are
        not needed any more."""
        own, finish = self._prepared(sends, kind, recvs)
        if self.size == 1:
            return Reduction(None, finish)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "relax_grad reductions")
        work = self._thread.submit(_reduce, self._beside, own, kind)
        return Reduction(_Work(work), finish)

    def _prepared(
        self, sends: Sequence, kind: str, recvs: Sequence
    ) -> tuple[np.ndarray, Callable[[], None]]:
        """Return a vector of tensors to reduce, and the function that writes the results."""
        operands = [viewed(tensor) for tensor in sends]
        results = [viewed(tensor) for tensor in recvs]
        dtype = REDUCED_IN.get(str(operands[0].dtype))
        if len(operands) == 1 and not dtype:
            own = results[0]
            own[...] = operands[0]
        else:
            own = np.concatenate(
                [operand.astype(dtype) if dtype else operand for operand in operands]
            )

        def finish() -> None:
            if kind == "avg":
                divide(own, self.size)
            if own is not results[0]:
                ends = np.cumsum([result.size for result in results])[:-1]
                for result, part in zip(results, np.split(own, ends), strict=True):
                    result[...] = part

        return own, finish

    def allgather(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor) -> None:
        """Write the tensors of all workers to ``recv``, in the order of their numbers."""
        self._communicator.Allgather(_bytes(send), _bytes(recv))

    def broadcast(self, send: tvm.runtime.Tensor | None, recv: tvm.runtime.Tensor) -> None:
        """Write the tensor of worker 0 to ``recv``; ``send`` is None on the others."""
        result = _bytes(recv)
        if send is not None:
            result[...] = _bytes(send)
        self._communicator.Bcast(result, 0)

    def scatter(self, send: tvm.runtime.Tensor | None, recv: tvm.runtime.Tensor) -> None:
        """Write the worker's part of the tensor of worker 0 to ``recv``; ``send`` is None on the
        others."""
        self._communicator.Scatter(None if send is None else _bytes(send), _bytes(recv), 0)

    def gather(self, send: tvm.runtime.Tensor, recv: tvm.runtime.Tensor | None) -> None:
        """Write the tensors of all workers to ``recv`` of worker 0, which is None on the others."""
        self._communicator.Gather(_bytes(send), None if recv is None else _bytes(recv), 0)

    def send(self, buffer: tvm.runtime.Tensor, receiver: int) -> None:
        """Send a tensor to another worker."""
        self._communicator.Send(_bytes(buffer), receiver)

    def recv(self, buffer: tvm.runtime.Tensor, sender: int) -> None:
        """Receive a tensor of another worker."""
        self._communicator.Recv(_bytes(buffer), sender)


def _reduce(communicator: Any, own: np.ndarray, kind: str) -> None:
    from mpi4py import MPI

    operations = {"prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
    communicator.Allreduce(MPI.IN_PLACE, own, operations.get(kind, MPI.SUM))


def _bytes(tensor: tvm.runtime.Tensor) -> np.ndarray:
    return viewed(tensor).view(np.uint8)


def connect(settings: dict, rank: int) -> tuple[Mpi, Mpi, Mpi]:
    """Return the connections of a worker: to all workers, within its group, and to the
    workers of its place in other groups."""
    from mpi4py import MPI

    size, groups = settings["num_workers"], settings["num_groups"]
    group_size = size // groups
    world = Mpi(MPI.COMM_WORLD.Dup())

    def among(color: int, count: int) -> Mpi:
        return world if count == size else Mpi(MPI.COMM_WORLD.Split(color, rank))

    return world, among(rank // group_size, group_size), among(rank % group_size, groups)
