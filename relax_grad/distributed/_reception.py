"""Connections that come to a controller: they are greeted side by side, and a stranger is only a
line of the log."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from . import _handshake
from ._handshake import Refused, VersionMismatch
from .errors import WorkerError

#: The greetings at the same time. The oldest one ends if another connection comes: a machine that
#: knows the secret needs some milliseconds.
MOST = 64

#: The seconds between looks at the end of the reception, and after a connection that the system
#: could not give, such as without free file descriptors.
_LOOK = 0.1

LOG = logging.getLogger("relax_grad.distributed")


class Came(NamedTuple):
    """The machines that have come to a controller, and the reception of others."""

    reception: Reception
    machines: list[tuple[socket.socket, dict]]


class Reception:
    """The greetings of a controller, each in a thread.

    Parameters
    ----------
    listening : socket.socket
        The socket that listens, which is not closed here.
    secret : str
        The secret that machines must know.
    again : bool
        Whether other machines may be needed later: those that are not taken try again.

    Attributes
    ----------
    refused : deque[str]
        The last connections that were refused, with the reasons.
    """

    def __init__(self, listening: socket.socket, secret: str, again: bool = False):
        self._again = again
        self.refused: deque[str] = deque(maxlen=5)
        self._listening, self._secret = listening, secret
        self._greeted: queue.SimpleQueue = queue.SimpleQueue()
        self._pending: dict[int, socket.socket] = {}
        self._lock, self._is_over = threading.Lock(), threading.Event()
        listening.settimeout(_LOOK)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def next(self, seconds: float) -> tuple[socket.socket, dict] | None:
        """Return the next connection that has passed the greeting, and its introduction; None after
        the time.

        Raises
        ------
        WorkerError
            If a machine that knows the secret has other versions.
        """
        try:
            result = self._greeted.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if isinstance(result, WorkerError):
            raise result
        return result

    def gather(
        self, least: int, most: int, timeout: float, last_call: float
    ) -> list[tuple[socket.socket, dict]]:
        """Wait for machines, and return their connections and introductions.

        Parameters
        ----------
        least, most : int
            The numbers of machines.
        timeout : float
            The seconds in which the least number must have come.
        last_call : float
            The seconds in which others may come after them.

        Raises
        ------
        WorkerError
            If too few have come within the timeout.
        """
        begin = time.monotonic()
        machines: list[tuple[socket.socket, dict]] = []
        enough: float | None = begin if least == 0 else None
        while len(machines) < most:
            now = time.monotonic()
            left = begin + timeout - now if enough is None else enough + last_call - now
            if left <= 0 and enough is None:
                for connection, _ in machines:
                    self.dismiss(connection)
                raise too_few(len(machines), least, timeout, self.refused)
            if left <= 0:
                break
            came = self.next(min(left, 0.5))
            if came is not None and "rank" not in came[1]:
                machines.append(came)
            elif came is not None:  # a worker of an earlier session
                self.dismiss(came[0])
            for machine in [machine for machine in machines if has_gone(machine[0])]:
                machines.remove(machine)
                machine[0].close()
            enough = None if len(machines) < least else enough or time.monotonic()
        return machines

    def dismiss(self, connection: socket.socket) -> None:
        """Close the connection of a machine that is not needed now."""
        with connection, contextlib.suppress(OSError):
            if self._again:
                _handshake.send(connection, {"later": True}, time.monotonic() + 1.0)

    def close(self) -> None:
        """End all greetings, and close the connections that nobody has taken."""
        self._is_over.set()
        self._thread.join()
        with self._lock:
            for connection in self._pending.values():
                _end(connection)
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._greeted.get_nowait()
                if not isinstance(result, WorkerError):
                    self.dismiss(result[0])

    def _accept(self) -> None:
        number = 0
        while not self._is_over.is_set():
            try:
                connection, address = self._listening.accept()
            except TimeoutError:
                continue
            except OSError as error:
                LOG.warning("cannot accept a connection: %s", error)
                time.sleep(_LOOK)
                continue
            number += 1
            with self._lock:
                if len(self._pending) >= MOST:
                    _end(self._pending.pop(min(self._pending)))
                self._pending[number] = connection
            greeting = threading.Thread(
                target=self._greet, args=(number, connection, str(address[0])), daemon=True
            )
            try:
                greeting.start()
            except RuntimeError as error:  # the system gives no more threads
                self._refuse(number, connection, str(address[0]), str(error))

    def _greet(self, number: int, connection: socket.socket, address: str) -> None:
        try:
            introduction = _handshake.welcome(connection, self._secret)
        except VersionMismatch as error:
            cause = (
                f"{error} (it has connected from {address}); install the same ones on all machines"
            )
            self._refuse(number, connection, address, str(error))
            self._greeted.put(WorkerError(None, error.host, cause))
        except Refused as error:
            self._refuse(number, connection, address, str(error))
        except Exception as error:  # whatever a stranger sends is a line of the log
            self._refuse(number, connection, address, f"{type(error).__name__}: {error}")
        else:
            with self._lock:
                self._pending.pop(number, None)
                if not self._is_over.is_set():
                    self._greeted.put((connection, introduction))
                    return
            connection.close()

    def _refuse(self, number: int, connection: socket.socket, address: str, reason: str) -> None:
        with self._lock:
            self._pending.pop(number, None)
        connection.close()
        if not self._is_over.is_set():
            LOG.warning("refused a connection from %s: %s", address, reason)
            self.refused.append(f"{address}: {reason}")


def too_few(came: int, count: int, timeout: float, refused: Collection[str]) -> WorkerError:
    """Return the error if too few machines have come in time."""
    reasons = f" {'; '.join(refused)} (refused)." if refused else ""
    return WorkerError(
        None,
        "",
        f"{came} of {count} other machines have connected within {timeout:g} s.{reasons} Start "
        "there: python -m relax_grad worker --controller HOST:PORT",
    )


def announce(listening: socket.socket) -> None:
    """Print how other machines connect."""
    host, port = listening.getsockname()[:2]
    print(
        f"waiting for other machines: python -m relax_grad worker --controller {host}:{port}",
        flush=True,
    )


def has_gone(connection: socket.socket) -> bool:
    """Tell whether the other side has closed a connection. Its bytes are left unread."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _end(connection: socket.socket) -> None:
    """End the reads and writes of a connection in other threads."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
