"""Sessions: a controller, its workers and their collectives."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import json
import os
import queue
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tvm_ffi

from ..cpu import threads as cpu_threads
from . import _gloo, _mpi_job, _nodes, _processes, _replica  # noqa: F401  (registers its tasks)
from ._calls import Calls, limit
from ._disco import disco, process_session
from ._options import Options, checked
from ._reception import Came, Reception, announce
from ._tasks import INBOXES, serve_controller
from ._watchdog import Watchdog, without_room

#: The seconds in which processes end by themselves, and in which worker 0 forgets its tensors.
_END, _LEAVE = 10.0, 5.0

_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


def session(
    num_workers: int,
    backend: str = "gloo",
    *,
    nodes: int = 1,
    num_groups: int = 1,
    threads: int | None = None,
    timeout: float = 300.0,
    start_timeout: float = 300.0,
    listen: str = "127.0.0.1:0",
    secret: str | None = None,
    shared_memory: bool = True,
) -> Session:
    """Start workers, and return a Disco session with collectives for the memory of CPUs.

    Worker 0 is a thread of this process, and the others are processes. With several nodes, each
    other machine runs ``python -m relax_grad worker --controller HOST:PORT``, and this function
    waits until all have connected.

    Parameters
    ----------
    num_workers : int
        The number of workers on all machines.
    backend : str
        The library that moves the bytes: ``"gloo"``. ``"mpi"`` is the library of ``mpiexec``, by
        mpi4py: all processes run the program, and those other than the first one become workers
        here, and end with it. ``"nccl"`` is TVM's own for GPUs, and needs a TVM that was built with
        it; there, all collectives are TVM's.
    nodes : int
        The number of machines, this one included. The workers are divided among them, in the order
        in which they connect. MPI places its processes itself.
    num_groups : int
        The number of groups of consecutive workers; collectives with ``in_group`` are within a
        group.
    threads : int, optional
        The threads of each worker; by default the cores of this machine, divided by its workers.
    timeout : float
        The seconds in which workers must take and answer a call, and must meet in a collective, and
        after which the connection of a machine that is gone has ended.
    start_timeout : float
        The seconds in which all machines must connect, and all workers must start.
    listen : str
        The address, ``"HOST:PORT"``, at which the controller waits for other machines; 0 is any
        free port. By default it is the loopback interface, which other machines do not reach.
    secret : str, optional
        The secret that other machines must know; by default the environment variable
        ``RELAX_GRAD_SECRET``.
    shared_memory : bool
        Whether workers of one machine exchange tensors by memory that they share, where the system
        has it (Linux), and gloo moves them between machines only. MPI has its own.

    Returns
    -------
    session : Session
        The session, which is a context manager.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    ImportError
        If PyTorch, whose gloo moves the bytes between machines, is not installed, or mpi4py.
    OSError
        If the address is in use.
    WorkerError
        If a worker does not start, or a machine does not connect or has other versions.
    SystemExit
        In the processes of MPI but the first one, when its program has ended.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.distributed import session
    >>> with session(2) as workers:
    ...     x = workers.broadcast(np.ones(3, "float32"))
    ...     total = workers.empty((3,), "float32")
    ...     workers.allreduce(x, total)
    ...     workers.debug(total, 1).numpy()
    array([2., 2., 2.], dtype=float32)
    """
    options = checked(
        num_workers,
        backend,
        nodes,
        num_groups,
        threads,
        timeout=timeout,
        start_timeout=start_timeout,
        listen=listen,
        secret=secret,
        shared_memory=shared_memory,
    )
    return open_session(options)


def open_session(options: Options, came: Came | None = None, again: bool = False) -> Session:
    """Return a session with checked options.

    Parameters
    ----------
    came : Came, optional
        The machines that have come already, and the reception of others.
    again : bool
        Whether another session of the same program follows if this one fails.
    """
    new_session = Session(options.num_workers, options.num_groups, options.backend, options.timeout)
    try:
        new_session._start(options, came, again)
    except BaseException as error:
        if not isinstance(error, Exception):
            new_session._release()
        new_session._abort()
        raise
    return new_session


@dataclass(frozen=True)
class _Layout:
    """Where the workers of a session are.

    Attributes
    ----------
    ranks : list[list[int]]
        The workers of each machine, this one first.
    threads : int
        The threads of each worker.
    """

    ranks: list[list[int]]
    threads: int

    @staticmethod
    def of(options: Options) -> _Layout:
        """Return the layout of a session: MPI places its processes itself, one at each place."""
        number, is_mpi = options.num_workers, options.backend == "mpi"
        counts = [1] * number if is_mpi else _processes.shares(number, options.nodes)
        ends = list(itertools.accumulate(counts))
        ranks = [list(range(end - own, end)) for end, own in zip(ends, counts, strict=True)]
        local = _mpi_job.local_workers() if is_mpi else counts[0]
        return _Layout(ranks, options.threads or max(1, cpu_threads.cores() // local))


class Session(Calls):
    """A Disco session whose workers have collectives; :func:`session` makes it.

    All methods of ``tvm.runtime.disco.Session`` are methods of this class too, such as
    ``broadcast``, ``allreduce``, ``load_vm_module`` and ``get_global_func``. An error of a worker
    in a collective is raised by :meth:`synchronize`.

    Attributes
    ----------
    disco : tvm.runtime.disco.Session
        Disco's session.
    num_workers, num_groups : int
        The numbers of workers and groups.
    hosts : list[str]
        The name of the machine of each worker.
    pids : dict[int, int]
        The process of each worker.
    timeout : float
        The seconds in which workers must answer.
    """

    def __init__(self, num_workers: int, num_groups: int, backend: str, timeout: float):
        super().__init__(num_workers, timeout)
        self.num_groups, self.backend = num_groups, backend
        self.inbox: dict = {}
        self._ended = False
        self._token = secrets.token_hex(16)
        self._store: object = None

    def _start(self, options: Options, came: Came | None, again: bool) -> None:
        """Start the workers."""
        layout = _Layout.of(options)
        # A thread of TVM may be bound to some of the processors of the process.
        processors = cpu_threads.processors()
        host = self._accept(options, layout, came, again)
        machine = _processes.Machine.of(layout.ranks[0], options.shared_memory)
        own = _nodes.LocalNode(machine, self.num_workers, self.num_groups, layout.threads, host)
        self._nodes.insert(0, own)
        placed = zip(self._nodes, layout.ranks, strict=True)
        self.hosts = [node.host for node, ranks in placed for _ in ranks]
        store = self._serve_store(layout, machine, host)
        self._join(machine, options.start_timeout)
        settings = {
            "token": self._token,
            "backend": self.backend,
            "store": store,
            "host": host,
            "timeout": self.timeout,
            "start_timeout": options.start_timeout,
            "num_workers": self.num_workers,
            "num_groups": self.num_groups,
            "threads": layout.threads,
            "processors": {str(rank): processors for rank in layout.ranks[0]},
        }
        self._begin(settings, options.start_timeout)
        _OPEN.add(self)

    def _accept(self, options: Options, layout: _Layout, came: Came | None, again: bool) -> str:
        """Wait for the other machines, and return the address of this one."""
        if len(layout.ranks) == 1:
            return "127.0.0.1"
        assignment = {
            "num_workers": self.num_workers,
            "num_groups": self.num_groups,
            "threads": layout.threads,
            "shares_memory": options.shared_memory,
            "timeout": self.timeout,
            "restarts": again,
        }
        node = _mpi_job.MpiNode if self.backend == "mpi" else _nodes.RemoteNode
        with contextlib.nullcontext(came) if came else self._reception(options) as reception:
            others = _nodes.accept_nodes(
                reception, layout.ranks[1:], assignment, options.start_timeout, node
            )
        self._nodes += others
        host = options.address[0]
        return others[0].own_address if host in ("0.0.0.0", "::") else host

    def _serve_store(self, layout: _Layout, machine: _processes.Machine, host: str) -> dict:
        """Serve the store in which the workers of gloo meet, where they need one, and return where
        it is."""
        shares_all = len(layout.ranks) == 1 and machine.memory != _processes.NO_MEMORY
        if self.backend == "mpi" or shares_all:
            return {}
        self._store, port = _gloo.serve(_nodes.listening_socket(host, 0))
        return {"host": host, "port": port, "prefix": self._token}

    def _join(self, machine: _processes.Machine, start_timeout: float) -> None:
        """Make Disco's session of all workers, which run already, and listen to them."""
        INBOXES[self._token] = (self._events.put, self.inbox, machine)
        serve_controller()
        self._channels = {
            rank: channel for node in self._nodes for rank, channel in node.channels().items()
        }
        self._watchdog = Watchdog(self._channels, limit(start_timeout), self._late)
        self._connect(self._channels)
        for node in self._nodes:
            node.listen(self._events.put)

    def _begin(self, settings: dict, start_timeout: float) -> None:
        """Begin the tasks and the collectives of all workers."""
        connected = self._connected()
        start = connected.get_global_func("relax_grad.distributed.start")
        self._run = connected.get_global_func("relax_grad.distributed.run")
        self._more = connected.get_global_func("relax_grad.distributed.more")
        pids = self._call(start, (), "the start", json.dumps(settings), start_timeout)
        self._watchdog.timeout = limit(self.timeout)
        self.pids = dict(enumerate(pids))
        if self.backend == "nccl":
            connected.init_ccl("nccl", *range(self.num_workers))

    @contextlib.contextmanager
    def _reception(self, options: Options) -> Iterator[Came]:
        """Yield the reception of other machines."""
        with _nodes.listening_socket(*options.address) as listening:
            if self.backend == "mpi":
                secret = _mpi_job.call_others(listening.getsockname()[:2])
            else:
                secret = options.secret or ""
                announce(listening)
            reception = Reception(listening, secret)
            try:
                yield Came(reception, [])
            finally:
                reception.close()

    def _connect(self, channels: dict[int, _processes.Channel]) -> None:
        """Make Disco's session on the channels of workers that run already."""
        disco()

        def pool(
            num_workers: int, num_groups: int, entrypoint: str
        ) -> Callable[[int], tvm_ffi.Shape | None]:
            def handles(rank: int) -> tvm_ffi.Shape | None:
                channel = channels.get(rank)
                return (
                    None if channel is None else tvm_ffi.Shape([channel.replies, channel.commands])
                )

            return handles

        name = f"relax_grad.distributed.pool.{self._token}"
        tvm_ffi.register_global_func(name, pool)
        try:
            self.disco = process_session(self.num_workers, self.num_groups, name)
        finally:
            tvm_ffi.registry.remove_global_func(name)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or self.__dict__.get("disco") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._check_open()
        value = getattr(self.disco, name)
        return functools.partial(self._bounded, name, value) if callable(value) else value

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The end

    def close(self) -> None:
        """End the workers. Values of Disco that are still in use stay valid on worker 0 only."""
        if self._is_open():
            self._release()
            self._finish(graceful=True)

    def _abort(self) -> None:
        """End the workers at once."""
        if self._is_open():
            self._finish(graceful=False)

    def _is_open(self) -> bool:
        """Tell whether there are workers that this process must end. A child of a fork must not."""
        return not self._ended and os.getpid() == self._process

    def _finish(self, graceful: bool) -> None:
        self._ended = True
        _OPEN.discard(self)
        try:
            self._end_workers(graceful)
        except BaseException:  # such as Ctrl-C within the wait for workers
            for node in self._nodes:
                node.kill()
            raise
        finally:
            INBOXES.pop(self._token, None)
            self._store = None

    def _end_workers(self, graceful: bool) -> None:
        """End the workers, and shut Disco down."""
        if self.disco is not None:
            self._watchdog.close()
            graceful = graceful and without_room(self._channels, _LEAVE) is None
        if not graceful:
            for node in self._nodes:
                node.kill()
            # Worker 0 may wait there for others. A thread that comes back from there while Python
            # ends would end the process.
            self._store = None
        if self.disco is not None:
            self._stop_worker_0()
        if graceful:
            for node in self._nodes:
                node.close(_END)

    def _stop_worker_0(self) -> None:
        """Shut Disco down.

        Its session is never freed: the destructor would wait for the thread of worker 0, and that
        for the threads of TVM, which spin for minutes where other programs take the processors.
        """
        session = self._connected()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
        self.disco = self._run = None
        self._calls += 1
        run = session.get_global_func("relax_grad.distributed.run")
        session.call_packed(run, self._calls, "leave", "{}")
        end = time.monotonic() + _LEAVE
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                if self._events.get(timeout=left).get("call") == self._calls:
                    break
        session.shutdown()


@atexit.register
def _close_all() -> None:
    for left in list(_OPEN):
        left._release()
        left.close() if left.backend == "mpi" else left._abort()
    _mpi_job.dismiss()


__all__ = ["Session", "session"]
