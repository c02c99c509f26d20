"""The machines of a session: this one, which starts processes, and others, which have connected."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from . import _handshake
from ._handshake import Refused, VersionMismatch, send
from ._processes import Channel, Machine, Process, cause_of, end_relay, relay
from .errors import WorkerError


class Node:
    """The workers of one machine.

    Attributes
    ----------
    host : str
        The name of the machine.
    """

    host: str

    def channels(self) -> dict[int, Channel]:
        """Return the channels of Disco by the numbers of the workers."""
        raise NotImplementedError

    def listen(self, notice: Callable[[dict], None]) -> None:
        """Pass the reports and the ends of workers on, from now on."""
        raise NotImplementedError

    def kill(self) -> None:
        """End all processes at once."""
        raise NotImplementedError

    def close(self, seconds: float) -> None:
        """Wait for the end of the processes, and end those that take longer."""
        raise NotImplementedError


class LocalNode(Node):
    """This machine, with processes for all of its workers but worker 0.

    Attributes
    ----------
    machine : Machine
        All of its workers.
    """

    def __init__(
        self, machine: Machine, num_workers: int, num_groups: int, threads: int, host: str
    ):
        self.host, self.machine = socket.gethostname(), machine
        self._processes: list[Process] = []
        self._channels: dict[int, Channel] = {}
        self._threads: list[threading.Thread] = []
        try:
            for rank in machine.ranks[1:]:
                self._start(rank, num_workers, num_groups, threads, host)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, num_workers: int, num_groups: int, threads: int, host: str) -> None:
        commands, to_worker = os.pipe()
        from_worker, replies = os.pipe()
        try:
            process = Process(
                *(rank, num_workers, num_groups, threads, host, host, commands, replies),
                self.machine,
            )
        finally:
            os.close(replies)
        self._processes.append(process)
        self._channels[rank] = Channel(to_worker, from_worker, commands)

    @property
    def pids(self) -> dict[int, int]:
        return {process.rank: process.pid for process in self._processes}

    def channels(self) -> dict[int, Channel]:
        return self._channels

    def listen(self, notice):
        for process in self._processes:
            thread = threading.Thread(target=self._watch, args=(process, notice), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _watch(self, process: Process, notice) -> None:
        with open(process.reports, closefd=False) as lines:
            for line in lines:
                notice(json.loads(line))
        code = process.wait()
        self._channels[process.rank].silence()
        notice({"rank": process.rank, "end": cause_of(code)})

    def kill(self):
        for process in self._processes:
            process.kill()
        self.machine.end_waits()  # worker 0 may wait for another one
        self._finish()

    def close(self, seconds):
        end = time.monotonic() + seconds
        for process in self._processes:
            if process.wait(max(0.0, end - time.monotonic())) is None:
                process.kill()
        self._finish()

    def _finish(self) -> None:
        for thread in self._threads:
            thread.join(5.0)
        if not self._threads:  # nothing has listened
            for channel in self._channels.values():
                channel.silence()
        for process in self._processes:
            process.close()
        self.machine.close()


class RemoteNode(Node):
    """Another machine, on which ``python -m relax_grad worker`` has started.

    Attributes
    ----------
    has_ended : bool
        Whether it has reported the end of a worker.

    Parameters
    ----------
    connection : socket.socket
        Its connection, after the greeting.
    introduction : dict
        Its introduction.
    """

    def __init__(self, connection: socket.socket, introduction: dict):
        self.host = str(introduction["host"])
        self._connection = connection
        self._relays: list[subprocess.Popen] = []
        self._channels: dict[int, Channel] = {}
        self._thread: threading.Thread | None = None
        self.has_ended = False

    @property
    def own_address(self) -> str:
        """The address of this machine by which the other one has reached it."""
        return self._connection.getsockname()[0]

    def assign(self, assignment: dict) -> None:
        """Tell the machine its workers."""
        send(self._connection, assignment)

    def add_channel(self, rank: int, connection: socket.socket) -> None:
        """Take a connection for the commands and replies of a worker."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        commands, to_worker = os.pipe()
        from_worker, replies = os.pipe()
        with connection:
            self._relays.append(relay(commands, replies, connection))
        os.close(replies)
        self._channels[rank] = Channel(to_worker, from_worker, commands)

    def channels(self) -> dict[int, Channel]:
        return self._channels

    def listen(self, notice):
        self._thread = threading.Thread(target=self._watch, args=(notice,), daemon=True)
        self._thread.start()

    def _watch(self, notice) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("r") as lines:
            for line in lines:
                event = json.loads(line)
                if "end" in event:
                    self._channels[event["rank"]].silence()
                    self.has_ended = True
                notice(event)
        for rank, channel in self._channels.items():
            channel.silence()
            notice({"rank": rank, "end": "the connection to its machine has ended"})

    def kill(self):
        self.close(0.0)

    def close(self, seconds):
        with contextlib.suppress(OSError):
            send(self._connection, {"end": seconds})
        if self._thread is not None:
            self._thread.join(seconds + 2.0)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(2.0)
        self._connection.close()
        for channel in self._channels.values():
            channel.silence()
        for open_relay in self._relays:
            end_relay(open_relay)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises
    ------
    OSError
        If the address is in use, or is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last connection has just ended may be used again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno,
            f"cannot listen at {host}:{port}: {error.strerror}; choose a free port, or end the "
            "program that uses it",
        ) from error
    return listener


def accept_nodes(
    listening: socket.socket,
    secret: str,
    ranks: list[list[int]],
    assignment: dict,
    timeout: float,
    kind: type[RemoteNode] = RemoteNode,
) -> list[RemoteNode]:
    """Wait for other machines, give them their workers, and take a connection for each worker.

    The workers of a machine are those at its ``place`` if its introduction has one, and else the
    next ones. Connections with a wrong secret are closed, and do not count.

    Raises
    ------
    WorkerError
        If too few machines have connected within the timeout, or if the versions of one differ.
    """
    end = time.monotonic() + timeout
    refused: list[str] = []
    nodes: list[RemoteNode] = []
    token = secrets.token_hex(16)
    wanted: dict[int, RemoteNode] = {}
    places: dict[RemoteNode, int] = {}
    try:
        while len(nodes) < len(ranks) or wanted:
            connection, introduction = _accept(listening, secret, end, refused)
            if connection is None:
                reasons = f" {'; '.join(refused)} (refused)." if refused else ""
                raise WorkerError(
                    None,
                    "",
                    f"{len(nodes)} of {len(ranks)} other machines have connected within "
                    f"{timeout:g} s.{reasons} Start there: python -m relax_grad worker "
                    "--controller HOST:PORT",
                )
            if introduction.get("token") == token and introduction.get("rank") in wanted:
                rank = introduction["rank"]
                wanted.pop(rank).add_channel(rank, connection)
            elif "rank" not in introduction and len(nodes) < len(ranks):
                node = kind(connection, introduction)
                own = ranks[introduction.get("place", len(nodes))]
                nodes.append(node)
                places[node] = own[0]
                node.assign({**assignment, "ranks": own, "token": token, "host": node.own_address})
                wanted.update(dict.fromkeys(own, node))
            else:
                connection.close()
    except BaseException:
        for node in nodes:
            node.kill()
        raise
    return sorted(nodes, key=places.__getitem__)


def _accept(listening: socket.socket, secret: str, end: float, refused: list[str]):
    """Return a connection that has passed the greeting and its introduction; None after the
    time."""
    while (left := end - time.monotonic()) > 0:
        listening.settimeout(min(left, 1.0))
        try:
            connection, address = listening.accept()
        except TimeoutError:
            continue
        try:
            return connection, _handshake.welcome(connection, secret)
        except Refused as error:
            connection.close()
            refused.append(f"{address[0]}: {error}")
            del refused[:-5]
        except VersionMismatch as error:
            connection.close()
            cause = (
                f"{error} (it has connected from {address[0]}); install the same ones on all "
                "machines"
            )
            raise WorkerError(None, error.host, cause) from error
        except OSError:
            connection.close()
    return None, {}
