"""The pipes of commands: waits for room in them, and a thread that notices workers that take no
commands.

A write to a full pipe waits in TVM, where Ctrl-C and timeouts have no effect. Hence a command is
sent only if it fits. What a program writes by Disco's own functions may still wait, and ends with
the worker, whose end this thread brings about.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import select
import termios
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

#: The bytes of a pipe, if the system gives so many: those that Disco's destructors write while a
#: worker is stopped must fit, because they hold Python's lock.
CAPACITY = 2**20

#: The most bytes of arguments in one command, with which it is shorter than ``PIPE_BUF``.
PART = 2048

#: The seconds between looks at the pipes.
_LOOK = 0.25


class Channel(Protocol):
    """The channel of a worker, with the file descriptor of its pipe of commands."""

    commands: int


def enlarge(pipe: int) -> None:
    """Let a pipe take more bytes before its reader comes, if the system allows it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, CAPACITY)


def parts(text: str) -> list[str]:
    """Return a text in parts for commands; at least one.

    >>> [len(part) for part in parts("x" * 5000)]
    [2048, 2048, 904]
    """
    return [text[i : i + PART] for i in range(0, max(1, len(text)), PART)]


def without_room(channels: Mapping[int, Channel], seconds: float) -> int | None:
    """Wait until each worker's pipe has room for two commands; return a worker whose pipe has none
    after the time, or None."""
    end = time.monotonic() + seconds
    for rank, channel in channels.items():
        while not _has_room(channel.commands):
            if time.monotonic() >= end:
                return rank
            time.sleep(0.005)
    return None


def _has_room(pipe: int) -> bool:
    """Tell whether most of a pipe is free. The null device has room always."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    if not any(event & select.POLLOUT for _, event in poll.poll(0)):
        return False
    return _unread(pipe) <= _capacity(pipe) // 4


def _unread(pipe: int) -> int:
    """Return the bytes that the reader of a pipe has not read."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(pipe, termios.FIONREAD, count)
    except OSError:  # the null device
        return 0
    return count[0]


def _capacity(pipe: int) -> int:
    try:
        return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    except (OSError, AttributeError):
        return 2**16


class Watchdog:
    """A thread that ends workers that have taken no command for too long.

    Parameters
    ----------
    channels : Mapping[int, Channel]
        The channels by the workers.
    late : Callable
        Called with the number of such a worker, once.

    Attributes
    ----------
    timeout : float
        The seconds in which a worker must take a command.
    end : float
        The time of ``time.monotonic`` at which a call of Disco must have returned; infinite outside
        of calls.
    """

    def __init__(self, channels: Mapping[int, Channel], timeout: float, late: Callable):
        self.timeout, self.end = timeout, float("inf")
        self._is_over = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        arguments = (dict(channels), weakref.ref(self), self._is_over, weakref.WeakMethod(late))
        threading.Thread(target=_watch, args=arguments, daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()

    def look(self, channels: Mapping[int, Channel], now: float) -> int | None:
        """Return a worker that is late, or None."""
        full = []
        for rank, channel in channels.items():
            unread = _unread(channel.commands)
            before, since = self._seen.get(rank, (0, now))
            if not unread or unread != before:
                since = now
            self._seen[rank] = unread, since
            if now - since > self.timeout:
                return rank
            full += [rank] * (unread > 0)
        if now > self.end:
            self.end = float("inf")
            return full[0] if full else next(iter(channels), None)
        return None


def _watch(
    channels: dict[int, Any], own: weakref.ref, is_over: threading.Event, late: weakref.WeakMethod
) -> None:
    while not is_over.wait(_LOOK):
        watchdog, notice = own(), late()
        if watchdog is None or notice is None:
            return
        rank = watchdog.look(channels, time.monotonic())
        if rank is not None:
            del channels[rank]
            notice(rank)
        del watchdog, notice


__all__ = ["CAPACITY", "PART", "Watchdog", "enlarge", "parts", "without_room"]
