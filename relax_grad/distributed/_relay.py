"""A process between Disco's pipes and the connection to another machine:
``python _relay.py COMMANDS REPLIES CONNECTION CONTROLLER``.

The destructors of Disco's objects write commands. An error there would end the process of the
controller, and another machine may end at any time. A pipe whose reader lives takes all writes, and
this process, which needs nothing of the package, discards those for a machine that has ended. A
thread of the controller could not do so: it would wait for Python's lock, which a destructor holds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading

_CHUNK = 2**20


def forward(commands: int, connection: socket.socket) -> None:
    """Send commands to the machine until their end; those that it does not take are lost."""
    is_open = True
    while data := os.read(commands, _CHUNK):
        if is_open:
            try:
                connection.sendall(data)
            except OSError:
                is_open = False
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def backward(connection: socket.socket, replies: int) -> None:
    """Write replies of the machine until its end."""
    with contextlib.suppress(OSError):
        while data := connection.recv(_CHUNK):
            view = memoryview(data)
            while view:
                view = view[os.write(replies, view) :]
    os.close(replies)


def end_with(controller: int) -> None:
    """End this process when the controller has ended: its children may have the pipes too."""
    with contextlib.suppress(ProcessLookupError):
        try:
            handle = os.pidfd_open(controller)
        except (AttributeError, PermissionError):  # another system than Linux, or it is not allowed
            return
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    os._exit(1)


def main(commands: int, replies: int, handle: int, controller: int) -> None:
    """Relay until the commands end.

    Parameters
    ----------
    commands, replies, handle : int
        The file descriptors to read from, to write to, and of the connection.
    controller : int
        The process that has started this one.
    """
    threading.Thread(target=end_with, args=(controller,), daemon=True).start()
    connection = socket.socket(fileno=handle)
    threading.Thread(target=backward, args=(connection, replies), daemon=True).start()
    forward(commands, connection)
    connection.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)  # the other thread may wait for replies
