"""Transport between processes by MPI, with the package mpi4py, and the processes of ``mpiexec`` as workers.

All processes run the same program. In the first one, a session begins. The others serve it, and end when the program of the first
one ends. Commands of Disco come by a connection to the first process, as from other machines, and MPI moves the tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import secrets
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by it)
import numpy as np
import tvm

from . import _handshake, _replica  # noqa: F401  (registers its tasks)
from ._disco import disco
from ._gloo import Reduction
from ._nodes import RemoteNode
from ._tasks import serve

#: The dtypes that are reduced as others, which MPI knows or which are exact enough.
_REDUCED_IN = {"float16": "float32", "bfloat16": "float32", "bool": "uint8"}


class _Job:
    """The processes of ``mpiexec``.

    Attributes
    ----------
    local : int
        The number of them on this machine; 0 before the first session.
    has_begun, has_failed : bool
        Whether the others wait for sessions, and whether they must end at once because a session has failed.
    """

    local = 0
    has_begun = has_failed = False


_JOB = _Job()


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
        # MPI moves the bytes of an operation only within calls: those of reductions that have started are in this thread.
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
        """Start to write the reduced tensor to ``recv``, and return the reduction. ``send`` is not needed any more."""
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
        """Write the worker's part of the tensor of worker 0 to ``recv``; ``send`` is None on the others."""
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
    """Return the connections of a worker: to all workers, within its group, and to those of its place in other groups."""
    from mpi4py import MPI

    size, groups = settings["num_workers"], settings["num_groups"]
    each = size // groups
    world = Mpi(MPI.COMM_WORLD.Dup())

    def among(color: int, count: int) -> Mpi:
        return world if count == size else Mpi(MPI.COMM_WORLD.Split(color, rank))

    return world, among(rank // each, each), among(rank % each, groups)


# Sessions


def is_first(num_workers: int) -> bool:
    """Tell whether this process is the first one, whose program begins sessions.

    Raises
    ------
    ImportError
        If mpi4py or the library of MPI is missing.
    ValueError
        If ``mpiexec`` has started another number of processes.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"{error}: the backend mpi needs mpi4py and a library of MPI; install them with: pip install '.[mpi]'"
        ) from error
    size = MPI.COMM_WORLD.Get_size()
    if size != num_workers:
        raise ValueError(
            f"num_workers is {num_workers}, but MPI has {size} processes; start the program with: mpiexec -n {num_workers} python "
            "PROGRAM, and give the same number"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ValueError(
            "the library of MPI gives no MPI_THREAD_MULTIPLE, which reductions beside computations need; use another one, and leave "
            "mpi4py.rc.thread_level as it is"
        )
    if not _JOB.local:
        shared = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        _JOB.local = shared.Get_size()
        shared.Free()
    return MPI.COMM_WORLD.Get_rank() == 0


def local_workers() -> int:
    """Return the number of processes on this machine."""
    return _JOB.local


def own_address(listen: str) -> str:
    """Return the address at which the first process listens: the given one, or one that all machines reach."""
    from mpi4py import MPI

    is_default = listen.startswith("127.0.0.1:")
    if is_default and _JOB.local < MPI.COMM_WORLD.Get_size():
        return f"{socket.gethostbyname(socket.gethostname())}:{listen.rpartition(':')[2]}"
    return listen


def call_others(address: tuple[str, int]) -> str:
    """Tell the other processes that a session begins at an address, and return the secret, which MPI carries."""
    secret = secrets.token_hex(32)
    _JOB.has_begun = True
    _tell({"address": list(address), "secret": secret})
    return secret


def dismiss() -> None:
    """Let the other processes end, as this one is about to; after a failure, all end at once."""
    if not _JOB.has_begun:
        return
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    if _JOB.has_failed:
        MPI.COMM_WORLD.Abort(1)
    _tell(None)


def _tell(message: dict | None) -> None:
    from mpi4py import MPI

    data = np.frombuffer(json.dumps(message).encode(), np.uint8).copy()
    MPI.COMM_WORLD.Bcast(np.array([data.size], "int64"), 0)
    MPI.COMM_WORLD.Bcast(data, 0)


def _told() -> dict | None:
    from mpi4py import MPI

    size = np.zeros(1, "int64")
    MPI.COMM_WORLD.Bcast(size, 0)
    data = np.zeros(int(size[0]), np.uint8)
    MPI.COMM_WORLD.Bcast(data, 0)
    return json.loads(data.tobytes())


class MpiNode(RemoteNode):
    """Another process of ``mpiexec``, which is one worker."""

    def kill(self):
        """Let the process end together with this one: ``mpiexec`` would end this one with it."""
        _JOB.has_failed = True
        for each in self.channels().values():
            each.silence()

    def close(self, seconds):
        super().close(seconds)
        _JOB.has_failed = _JOB.has_failed or not self.has_ended


def serve_sessions() -> None:
    """Run the workers of this process until the program of the first process ends.

    Raises
    ------
    SystemExit
        At the end.
    """
    while (message := _told()) is not None:
        _serve_session(tuple(message["address"]), message["secret"])
    raise SystemExit(0)


def _serve_session(address: tuple[str, int], secret: str) -> None:
    from mpi4py import MPI

    disco()
    rank = MPI.COMM_WORLD.Get_rank()
    with socket.create_connection(address, 30.0) as control:
        _handshake.introduce(control, secret, {"place": rank - 1})
        lines = control.makefile("r")
        assignment = json.loads(lines.readline())
        has_ended = threading.Event()
        threading.Thread(target=_end_with, args=(lines, has_ended), daemon=True).start()
        lock = threading.Lock()

        def report(found: dict) -> None:
            with lock, contextlib.suppress(OSError):
                control.sendall(json.dumps(found).encode() + b"\n")

        with socket.create_connection(address, 30.0) as channel:
            more = {"rank": rank, "token": assignment["token"]}
            _handshake.introduce(channel, secret, more)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            serve(rank, assignment["num_workers"], report, "", "")
            process = tvm.get_global_func("runtime.disco.WorkerProcess")
            handle = channel.detach()
            try:
                process(rank, assignment["num_workers"], assignment["num_groups"], handle, handle)
            except Exception as error:
                report({"rank": rank, "end": f"it has failed: {error}"})
                raise
        has_ended.set()
        report({"rank": rank, "end": "its session has ended"})
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)


def _end_with(lines, has_ended: threading.Event) -> None:
    """End this process when that of the controller ends."""
    with contextlib.suppress(OSError, ValueError):
        for line in lines:
            if "end" in json.loads(line):
                return
    if not has_ended.is_set():
        os._exit(1)
