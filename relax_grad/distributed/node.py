"""A machine that takes work from a controller elsewhere:
``python -m relax_grad worker --controller HOST:PORT``."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import TextIO

from . import _handshake
from ._handshake import Refused, Unanswered, check_secret
from ._links import keep_alive
from ._processes import Machine, Process, address_of, cause_of, kill_all

#: The longest assignment in bytes, and the seconds between attempts to connect.
_LONGEST, _PAUSE = 2**20, 0.5

#: The most seconds in which workers may end by themselves.
_END = 60.0


def serve(controller: str, secret: str, timeout: float = 300.0) -> int:
    """Connect to a controller, and run its workers until it ends the session.

    If the controller starts the session again after a failure, as
    :func:`relax_grad.distributed.run` does, this machine takes part in it again.

    Parameters
    ----------
    controller : str
        The address of the controller, ``"HOST:PORT"``.
    secret : str
        The secret that the controller must know, and to which this machine answers.
    timeout : float
        The seconds in which the controller must accept the connection, at first and for each
        further session.

    Returns
    -------
    code : int
        0 if the controller has ended the session, and 1 if the connection or a worker has ended.

    Raises
    ------
    ValueError, TypeError
        If the address or the secret does not fit.
    ConnectionError
        If no controller answers within the timeout, or it refuses this machine.
    """
    address = address_of(controller)
    check_secret(secret)
    end = time.monotonic() + timeout
    while True:
        assignment = None
        try:
            with (
                _connect(address, max(0.0, end - time.monotonic())) as connection,
                connection.makefile("r") as lines,
            ):
                _handshake.introduce(connection, secret, {})
                connection.settimeout(timeout)
                assignment = _assignment(lines)
                if assignment is not None:
                    connection.settimeout(None)
                    keep_alive(connection, assignment["timeout"])
                    code = _Service(connection, address, secret, assignment).run(lines)
                    if code is not None:
                        return code
                    end = time.monotonic() + timeout
        except OSError as error:
            # A controller may begin no session at this moment, or may begin another one.
            again = assignment["restarts"] if assignment else isinstance(error, Unanswered)
            if not again or time.monotonic() + _PAUSE > end:
                raise
        time.sleep(_PAUSE)


def _assignment(lines: TextIO) -> dict | None:
    """Return the assignment of a controller; None if it has enough machines for now."""
    text = lines.readline(_LONGEST)
    if not text.endswith("\n"):
        raise Refused("the controller has closed the connection; it has enough machines")
    assignment = json.loads(text)
    return None if "later" in assignment else assignment


class _Service:
    """The workers of this machine."""

    def __init__(
        self, connection: socket.socket, address: tuple[str, int], secret: str, assignment: dict
    ):
        self._connection, self._lock = connection, threading.Lock()
        self._restarts = bool(assignment["restarts"])
        self._processes: list[Process] = []
        self._watchers: list[threading.Thread] = []
        host = connection.getsockname()[0]
        self._machine = Machine.of(assignment["ranks"], assignment["shares_memory"])
        try:
            for rank in assignment["ranks"]:
                self._start(rank, assignment, address, secret, host)
        except BaseException:
            self._end()
            raise

    def _start(
        self, rank: int, assignment: dict, address: tuple[str, int], secret: str, host: str
    ) -> None:
        more = {"rank": rank, "token": assignment["token"]}
        with socket.create_connection(address, 10.0) as channel:
            _handshake.introduce(channel, secret, more)
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(channel, assignment["timeout"])
            process = Process(
                rank,
                assignment["num_workers"],
                assignment["num_groups"],
                threads=assignment["threads"],
                host=host,
                store=assignment["host"],
                commands=channel.fileno(),
                replies=channel.fileno(),
                machine=self._machine,
            )
        self._processes.append(process)
        watcher = threading.Thread(target=self._watch, args=(process,), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def _watch(self, process: Process) -> None:
        """Pass the reports of a worker on, and its end."""
        with open(process.reports, closefd=False) as lines:
            for line in lines:
                self._send(line.encode())
        end = {"rank": process.rank, "end": cause_of(process.wait())}
        self._send(json.dumps(end).encode() + b"\n")

    def _send(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(line)

    def run(self, lines: TextIO) -> int | None:
        """Wait for the end of the session; return the exit code, or None if another one follows."""
        seconds, code, again = 0.0, 1, self._restarts
        with contextlib.suppress(Exception):  # the connection has ended, or is another one's
            text = lines.readline(_LONGEST)
            if text:
                message = json.loads(text)
                seconds, code, again = float(message["end"]), 0, bool(message["again"])
        end = time.monotonic() + min(max(0.0, seconds), _END)
        for process in self._processes:
            if process.wait(max(0.0, end - time.monotonic())) is None:
                code = 1
        self._end()
        return None if again else code

    def _end(self) -> None:
        """End all workers at once."""
        kill_all(self._processes)
        for watcher in self._watchers:
            watcher.join(2.0)
        for process in self._processes:
            process.close()
        self._machine.close()


def _connect(address: tuple[str, int], timeout: float) -> socket.socket:
    end = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection(address, 10.0)
        except OSError as error:  # noqa: PERF203 (the controller may start later)
            if time.monotonic() + _PAUSE > end:
                raise ConnectionError(
                    f"no controller answers at {address[0]}:{address[1]}: {error}; start it with "
                    "relax_grad.distributed.session(..., nodes=N, listen=...), and check the "
                    "address"
                ) from error
            time.sleep(_PAUSE)


__all__ = ["serve"]
