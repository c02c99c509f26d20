"""Sessions in the processes of ``mpiexec``.

All processes run the same program. In the first one, a session begins. The others serve it, and end
when the program of the first one ends. Commands of Disco come by a connection to the first process,
as from other machines, and MPI moves the tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterable

import numpy as np
import tvm

from .._packages import REQUIREMENTS
from . import _handshake, _replica  # noqa: F401  (registers its tasks)
from ._disco import disco
from ._links import keep_alive
from ._nodes import RemoteNode
from ._tasks import serve


class _Job:
    """The processes of ``mpiexec``.

    Attributes
    ----------
    local : int
        The number of them on this machine; 0 before the first session.
    process : int
        The process of MPI. Its children are others.
    has_begun, has_failed : bool
        Whether the others wait for sessions, and whether they must end at once because a session
        has failed.
    """

    local, process = 0, os.getpid()
    has_begun = has_failed = False


_JOB = _Job()


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
            f"{error}: the backend mpi needs mpi4py and a library of MPI; install them with: pip "
            f"install '{REQUIREMENTS['mpi4py']}' mpich"
        ) from error
    size = MPI.COMM_WORLD.Get_size()
    if size != num_workers:
        raise ValueError(
            f"num_workers is {num_workers}, but MPI has {size} processes; start the program "
            f"with: mpiexec -n {num_workers} python PROGRAM, and give the same number"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ValueError(
            "the library of MPI gives no MPI_THREAD_MULTIPLE, which reductions beside "
            "computations need; use another one, and leave mpi4py.rc.thread_level as it is"
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
    """Return the address at which the first process listens: the given one, or one that all
    machines reach."""
    from mpi4py import MPI

    is_default = listen.startswith("127.0.0.1:")
    if is_default and _JOB.local < MPI.COMM_WORLD.Get_size():
        return f"{socket.gethostbyname(socket.gethostname())}:{listen.rpartition(':')[2]}"
    return listen


def call_others(address: tuple[str, int]) -> str:
    """Tell the other processes that a session begins at an address, and return the secret, which
    MPI carries."""
    secret = secrets.token_hex(32)
    _JOB.has_begun = True
    _tell({"address": list(address), "secret": secret})
    return secret


def dismiss() -> None:
    """Let the other processes end, as this one is about to; after a failure, all end at once."""
    if not _JOB.has_begun or os.getpid() != _JOB.process:
        return
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    if _JOB.has_failed:
        MPI.COMM_WORLD.Abort(1)
    _tell(None)


def _tell(message: dict | None) -> None:
    from mpi4py import MPI

    data: np.ndarray = np.frombuffer(json.dumps(message).encode(), np.uint8).copy()
    MPI.COMM_WORLD.Bcast(np.array([data.size], "int64"), 0)
    MPI.COMM_WORLD.Bcast(data, 0)


def _told() -> dict | None:
    from mpi4py import MPI

    size: np.ndarray = np.zeros(1, "int64")
    MPI.COMM_WORLD.Bcast(size, 0)
    data: np.ndarray = np.zeros(int(size[0]), np.uint8)
    MPI.COMM_WORLD.Bcast(data, 0)
    return json.loads(data.tobytes())


class MpiNode(RemoteNode):
    """Another process of ``mpiexec``, which is one worker."""

    def kill(self) -> None:
        """Let the process end together with this one: ``mpiexec`` would end this one with it."""
        _JOB.has_failed = True
        for channel in self.channels().values():
            channel.silence()

    def close(self, seconds: float) -> None:
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
        keep_alive(control, assignment["timeout"])
        has_ended = threading.Event()
        threading.Thread(target=_end_with, args=(lines, has_ended), daemon=True).start()
        lock = threading.Lock()

        def report(event: dict) -> None:
            with lock, contextlib.suppress(OSError):
                control.sendall(json.dumps(event).encode() + b"\n")

        with socket.create_connection(address, 30.0) as channel:
            more = {"rank": rank, "token": assignment["token"]}
            _handshake.introduce(channel, secret, more)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(channel, assignment["timeout"])
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


def _end_with(lines: Iterable[str], has_ended: threading.Event) -> None:
    """End this process when the controller's ends."""
    with contextlib.suppress(OSError, ValueError):
        for line in lines:
            if "end" in json.loads(line):
                return
    if not has_ended.is_set():
        os._exit(1)
