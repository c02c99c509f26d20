"""The ends of connections and of processes: what notices that the other side is gone."""

from __future__ import annotations

import os
import select
import socket

#: The probes of an idle connection, after which it has ended.
_PROBES = 4


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Let a connection fail if the other machine or the network between is gone for some seconds,
    whether something is being sent or not."""
    # The probes begin after a third of the time, and take the rest.
    idle = min(max(1, int(seconds / 3)), 2**15 - 1)
    between = min(max(1, int((seconds - idle) / _PROBES)), 2**15 - 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has another name for TCP_KEEPIDLE. Sent data that is not acknowledged ends the
    # connection too, by TCP_USER_TIMEOUT (RFC 5482); its unit is 1 ms.
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPALIVE", idle),
        ("TCP_KEEPINTVL", between),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", min(int(seconds * 1000), 2**31 - 1)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wait_for_end(pipe: int, process: int) -> None:
    """Wait until the other end of a pipe is closed, or the parent process has ended.

    A child of the parent may have inherited the other end of the pipe, and live longer. Linux tells
    the end of a process itself.

    Parameters
    ----------
    pipe : int
        The file descriptor of the pipe's end to read from.
    process : int
        The number of the parent process.
    """
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    try:
        poll.register(os.pidfd_open(process), select.POLLIN)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # another system than Linux, or it is not allowed
        pass
    poll.poll()
