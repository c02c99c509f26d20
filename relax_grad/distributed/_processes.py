"""Processes of workers: their start, their end, and the file descriptors between them and the
controller."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from . import _memory
from ._watchdog import enlarge

#: The variables that give each library of a worker its number of threads.
_THREADS = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


#: The file descriptor that replaces shared memory, where there is none.
NO_MEMORY = -1


class Held(Protocol):
    """An object with connections to workers."""

    def leave(self) -> None:
        """Close them in this process, which is a child of that with the session."""


#: The objects with connections to workers, which children of a fork must not keep: a worker whose
#: controller has ended would wait for the children too.
_HELD: weakref.WeakSet[Held] = weakref.WeakSet()


def hold(held: Held) -> None:
    """Let an object leave its connections in children of a fork."""
    _HELD.add(held)


def _leave_all() -> None:
    for held in list(_HELD):
        held.leave()


os.register_at_fork(after_in_child=_leave_all)


class Machine(NamedTuple):
    """The workers of one machine.

    Attributes
    ----------
    ranks : list[int]
        Their numbers.
    memory : int
        The file descriptor of the memory that they share; :data:`NO_MEMORY` without it.
    """

    ranks: list[int]
    memory: int

    @classmethod
    def of(cls, ranks: Sequence[int], shares_memory: bool) -> Machine:
        """Return the workers of this machine, with new memory if they share some."""
        is_shared = shares_memory and len(ranks) > 1 and _memory.is_available()
        return cls(list(ranks), _memory.create(len(ranks)) if is_shared else NO_MEMORY)

    def end_waits(self) -> None:
        """Let all waits for messages in the memory fail."""
        if self.memory != NO_MEMORY:
            _memory.end(self.memory)

    def close(self) -> None:
        """Close the file descriptor."""
        if self.memory != NO_MEMORY:
            os.close(self.memory)


class Process:
    """The process of a worker on this machine.

    Parameters
    ----------
    rank, num_workers, num_groups : int
        The worker's number, and the numbers of workers and groups.
    threads : int
        The threads of its libraries.
    host, store : str
        The addresses of this machine, and of the controller's machine.
    commands, replies : int
        The file descriptors of Disco's commands and replies, which this process keeps as well.
    machine : Machine
        The workers of this machine.

    Attributes
    ----------
    reports : int
        The file descriptor of the reports of its tasks. It ends when the process ends.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        num_groups: int,
        threads: int,
        host: str,
        store: str,
        commands: int,
        replies: int,
        machine: Machine,
    ):
        self.rank = rank
        self.reports, reports = os.pipe()
        parent, self._parent = os.pipe()
        passed = [commands, replies, reports, parent, machine.memory]
        numbers = [rank, num_workers, num_groups, os.getpid(), *passed]
        addresses = [host, store]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", __package__ + "._worker"),
                *map(str, [*numbers, *addresses, *machine.ranks]),
            ],
            pass_fds=tuple({*passed} - {NO_MEMORY}),
            env=_environment(threads),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the controller, which ends its workers
        )
        os.close(reports)
        os.close(parent)
        _HELD.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code, or None if the process runs for longer than the timeout."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the file descriptors, after the end of the process."""
        _HELD.discard(self)
        self.leave()

    def leave(self) -> None:
        """Close the file descriptors."""
        for descriptor in (self.reports, self._parent):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **dict.fromkeys(_THREADS, str(threads)),
        "PYTHONPATH": os.pathsep.join([root, path] if path else [root]),
    }


def cause_of(code: int | None) -> str:
    """Return the reason of an exit, from its code."""
    if code is None:
        return "its process has ended"
    if code >= 0:
        return f"its process has ended with exit code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"


class Channel:
    """The controller's ends of the commands and replies of a worker.

    Both are pipes. The destructor of an object of Disco writes to the commands. An error there
    would end this process, and a worker may have ended at any time. Therefore a reader of the pipe
    stays open here, and :meth:`silence` replaces the commands by the null device.

    Parameters
    ----------
    commands, replies : int
        The file descriptors to write to and to read from.
    spare : int
        A further reader of the commands.
    """

    def __init__(self, commands: int, replies: int, spare: int):
        self.commands, self.replies = commands, replies
        self._spare: int | None = spare
        self._lock = threading.Lock()
        enlarge(commands)
        _HELD.add(self)

    def silence(self) -> None:
        """Let all writes succeed and all reads end, from now on."""
        for descriptor, mode in ((self.commands, os.O_WRONLY), (self.replies, os.O_RDONLY)):
            null = os.open(os.devnull, mode)
            os.dup2(null, descriptor, inheritable=False)
            os.close(null)
        with self._lock:
            if self._spare is not None:
                os.close(self._spare)  # ends a write that waits for space in the pipe
                self._spare = None

    def leave(self) -> None:
        """Do so in a child of a fork: its destructors must not write to the workers."""
        self._lock = threading.Lock()  # a thread that exists no more may have held it
        self.silence()


def relay(commands: int, replies: int, connection: socket.socket) -> subprocess.Popen:
    """Start the process between pipes and the connection to another machine, as of :mod:`._relay`.

    Parameters
    ----------
    commands, replies : int
        The file descriptors that it reads from and writes to, which stay open here.
    connection : socket.socket
        The connection, which stays open here.
    """
    handles = [commands, replies, connection.fileno()]
    script = str(Path(__file__).with_name("_relay.py"))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", script, *map(str, [*handles, os.getpid()])],
        pass_fds=handles,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_relay(process: subprocess.Popen) -> None:
    """Wait for the end of a relay, whose commands have ended."""
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def shares(total: int, parts: int) -> list[int]:
    """Return the sizes of parts as equal as possible, the larger ones first.

    >>> shares(7, 3)
    [3, 2, 2]
    """
    return [total // parts + (i < total % parts) for i in range(parts)]


def address_of(text: str) -> tuple[str, int]:
    """Return the host and the port of ``HOST:PORT``.

    >>> address_of("127.0.0.1:4000")
    ('127.0.0.1', 4000)
    """
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) < 2**16:
        raise ValueError(f"an address must have the form HOST:PORT, but it is {text!r}")
    return host, int(port)


def kill_all(processes: Sequence[Process]) -> None:
    """End processes at once."""
    for process in processes:
        process.kill()
