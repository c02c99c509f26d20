"""Transport between processes by MPI, with the package mpi4py."""

from __future__ import annotations

import ctypes
import math
from concurrent.futures import Future, ThreadPoolExecutor

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by it)
import numpy as np
import tvm

from ._gloo import Reduction

#: The dtypes that are reduced as others, which MPI knows or which are exact enough.
_REDUCED_IN = {"float16": "float32", "bfloat16": "float32", "bool": "uint8"}


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

    def __init__(self, communicator):
        self._communicator = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        # MPI moves the bytes of an operation only within calls: those of reductions that have
        # started are in this thread.
        self._beside = communicator.Dup() if self.size > 1 else None
        self._thread: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the thread. Communicators live as long as the processes."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def allreduce(self, send, kind: str, recv) -> None:
        """Write the reduced tensor to ``recv``."""
        own, finish = self._prepared(send, kind, recv)
        if self.size > 1:
            _reduce(self._communicator, own, kind)
        finish()

    def start_allreduce(self, send, kind: str, recv) -> Reduction:
        """Start to write the reduced tensor to ``recv``, and return the reduction. ``send`` is not
        needed any more."""
        own, finish = self._prepared(send, kind, recv)
        if self.size == 1:
            return Reduction(None, finish)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "relax_grad reductions")
        work = self._thread.submit(_reduce, self._beside, own, kind)
        return Reduction(_Work(work), finish)

    def _prepared(self, send, kind: str, recv):
        """Return a copy of a tensor to reduce, and the function that writes the result."""
        given, result = _viewed(send), _viewed(recv)
        dtype = _REDUCED_IN.get(str(given.dtype))
        if dtype:
            own = given.astype(dtype)
        else:
            own = result
            own[...] = given

        def finish() -> None:
            if kind == "avg":
                if own.dtype.kind == "f":
                    np.divide(own, self.size, out=own)
                else:  # towards 0
                    own[...] = (np.sign(own) * (np.abs(own) // self.size)).astype(own.dtype)
            if dtype:
                result[...] = own.astype(result.dtype)

        return own, finish

    def allgather(self, send, recv) -> None:
        """Write the tensors of all workers to ``recv``, in the order of their numbers."""
        self._communicator.Allgather(_bytes(send), _bytes(recv))

    def broadcast(self, send, recv) -> None:
        """Write the tensor of worker 0 to ``recv``; ``send`` is None on the others."""
        result = _bytes(recv)
        if send is not None:
            result[...] = _bytes(send)
        self._communicator.Bcast(result, 0)

    def scatter(self, send, recv) -> None:
        """Write the worker's part of the tensor of worker 0 to ``recv``; ``send`` is None on the
        others."""
        self._communicator.Scatter(None if send is None else _bytes(send), _bytes(recv), 0)

    def gather(self, send, recv) -> None:
        """Write the tensors of all workers to ``recv`` of worker 0, which is None on the others."""
        self._communicator.Gather(_bytes(send), None if recv is None else _bytes(recv), 0)

    def send(self, buffer, receiver: int) -> None:
        """Send a tensor to another worker."""
        self._communicator.Send(_bytes(buffer), receiver)

    def recv(self, buffer, sender: int) -> None:
        """Receive a tensor of another worker."""
        self._communicator.Recv(_bytes(buffer), sender)


def _reduce(communicator, own: np.ndarray, kind: str) -> None:
    from mpi4py import MPI

    operations = {"prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
    communicator.Allreduce(MPI.IN_PLACE, own, operations.get(kind, MPI.SUM))


def _viewed(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """Return the elements of a tensor as an array with the same memory."""
    dtype = np.dtype(str(tensor.dtype))
    size = dtype.itemsize * math.prod(map(int, tensor.shape))
    if not size:
        return np.empty(0, dtype)
    memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype)


def _bytes(tensor: tvm.runtime.Tensor) -> np.ndarray:
    return _viewed(tensor).view(np.uint8)


def connect(settings: dict, rank: int) -> tuple[Mpi, Mpi, Mpi]:
    """Return the connections of a worker: to all workers, within its group, and to those of its
    place in other groups."""
    from mpi4py import MPI

    size, groups = settings["num_workers"], settings["num_groups"]
    each = size // groups
    world = Mpi(MPI.COMM_WORLD.Dup())

    def among(color: int, count: int) -> Mpi:
        return world if count == size else Mpi(MPI.COMM_WORLD.Split(color, rank))

    return world, among(rank // each, each), among(rank % each, groups)
