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
from ._links import keep_alive
from ._processes import Channel, Machine, Process, cause_of, end_relay, hold, relay
from ._reception import LOG, Came, has_gone, too_few

#: The seconds between looks for machines that have ended while others are awaited.
_LOOK = 0.5

#: The longest report of a worker in bytes.
_LONGEST = 2**26


class Node:
    """The workers of one machine.

    Attributes
    ----------
    host : str
        The name of the machine.
    """

    host: str
    again = False

    def channels(self) -> dict[int, Channel]:
        """Return the channels of Disco by the numbers of the workers."""
        raise NotImplementedError

    def listen(self, notice: Callable[[dict], None]) -> None:
        """Pass the reports and the ends of workers on, from now on."""
        raise NotImplementedError

    def end_worker(self, rank: int) -> None:
        """End a worker at once, and all waits for it."""
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
        self._is_closed = False
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

    def listen(self, notice: Callable[[dict], None]) -> None:
        for process in self._processes:
            thread = threading.Thread(target=self._watch, args=(process, notice), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _watch(self, process: Process, notice: Callable[[dict], None]) -> None:
        with open(process.reports, closefd=False) as lines:
            for line in lines:
                notice(json.loads(line))
        code = process.wait()
        self._channels[process.rank].silence()
        notice({"rank": process.rank, "end": cause_of(code)})

    def end_worker(self, rank: int) -> None:
        for process in self._processes:
            if process.rank == rank:
                process.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        if not self._is_closed:
            self.machine.end_waits()  # worker 0 may wait for another one
        self._finish()

    def close(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes:
            if process.wait(max(0.0, end - time.monotonic())) is None:
                process.kill()
        self._finish()

    def _finish(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
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
    again : bool
        Whether another session of the same program follows, to which it connects.

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
        self._relays: dict[int, subprocess.Popen] = {}
        self._channels: dict[int, Channel] = {}
        self._thread: threading.Thread | None = None
        self.has_ended = self.again = False
        hold(self)

    @property
    def own_address(self) -> str:
        """The address of this machine by which the other one has reached it."""
        return self._connection.getsockname()[0]

    def leave(self) -> None:
        """Close the connection in a child of a fork. It stays open here."""
        handle = self._connection.detach()  # the reader of a thread would keep it open
        if handle >= 0:
            os.close(handle)

    def assign(self, assignment: dict) -> bool:
        """Tell the machine its workers; return whether it takes them."""
        try:
            keep_alive(self._connection, assignment["timeout"])
            _handshake.send(self._connection, assignment, time.monotonic() + _handshake.SECONDS)
            self._connection.settimeout(None)
        except OSError:
            return False
        return True

    def has_gone(self) -> bool:
        """Tell whether the machine has closed its connection. Reports are left unread."""
        return has_gone(self._connection)

    def add_channel(self, rank: int, connection: socket.socket, timeout: float) -> None:
        """Take a connection for the commands and replies of a worker, which ends if the machine is
        gone for some seconds."""
        keep_alive(connection, timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        commands, to_worker = os.pipe()
        from_worker, replies = os.pipe()
        with connection:
            self._relays[rank] = relay(commands, replies, connection)
        os.close(replies)
        self._channels[rank] = Channel(to_worker, from_worker, commands)

    def channels(self) -> dict[int, Channel]:
        return self._channels

    def listen(self, notice: Callable[[dict], None]) -> None:
        self._thread = threading.Thread(target=self._watch, args=(notice,), daemon=True)
        self._thread.start()

    def _watch(self, notice: Callable[[dict], None]) -> None:
        # Whatever ends the reports of this machine ends its workers.
        with contextlib.suppress(Exception), self._connection.makefile("r") as lines:
            while line := lines.readline(_LONGEST):
                event = json.loads(line)
                if "end" in event:
                    self._channels[event["rank"]].silence()
                    self.has_ended = True
                notice(event)
        for rank, channel in self._channels.items():
            channel.silence()
            notice({"rank": rank, "end": "the connection to its machine has ended"})

    def end_worker(self, rank: int) -> None:
        relayed = self._relays.get(rank)
        if relayed is not None:
            relayed.kill()
        self._channels[rank].silence()

    def kill(self) -> None:
        self.close(0.0)

    def close(self, seconds: float) -> None:
        with contextlib.suppress(OSError):
            _handshake.send(self._connection, {"end": seconds, "again": self.again})
        if self._thread is not None:
            self._thread.join(seconds + 2.0)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(2.0)
        self._connection.close()
        for channel in self._channels.values():
            channel.silence()
        for open_relay in self._relays.values():
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
    came: Came,
    ranks: list[list[int]],
    assignment: dict,
    timeout: float,
    kind: type[RemoteNode] = RemoteNode,
) -> list[RemoteNode]:
    """Wait for other machines, give them their workers, and take a connection for each worker.

    The workers of a machine are those at its ``place`` if its introduction has one, and else the
    first ones that are free. A machine that ends before the connections of its workers have come
    gives its place to another one.

    Parameters
    ----------
    came : Came
        The reception, and the machines that have come already.

    Raises
    ------
    WorkerError
        If too few machines have connected within the timeout, or if the versions of one differ.
    """
    end, (reception, machines) = time.monotonic() + timeout, came
    token = secrets.token_hex(16)
    nodes: dict[int, RemoteNode] = {}  # by their places
    wanted: dict[int, int] = {}  # the places by the workers whose connections have not come
    try:
        while len(nodes) < len(ranks) or wanted:
            left = end - time.monotonic()
            if left <= 0:
                raise too_few(len(nodes), len(ranks), timeout, reception.refused)
            greeted = machines.pop(0) if machines else reception.next(min(left, _LOOK))
            for place in [place for place, node in nodes.items() if node.has_gone()]:
                node = nodes.pop(place)
                LOG.warning("%s has ended before its workers have started", node.host)
                node.kill()
                wanted = {rank: of for rank, of in wanted.items() if of != place}
            if greeted is None:
                continue
            connection, introduction = greeted
            rank = introduction.get("rank")
            if rank is None:
                free = [place for place in range(len(ranks)) if place not in nodes]
                place = introduction.get("place", min(free, default=-1))
                if place in free:
                    node = kind(connection, introduction)
                    node.again = assignment["restarts"]
                    own = {"ranks": ranks[place], "token": token, "host": node.own_address}
                    if node.assign({**assignment, **own}):
                        nodes[place] = node
                        wanted.update(dict.fromkeys(ranks[place], place))
                        continue
            elif introduction.get("token") == token and rank in wanted:
                nodes[wanted.pop(rank)].add_channel(rank, connection, assignment["timeout"])
                continue
            reception.dismiss(connection)
    except BaseException:
        for node in nodes.values():
            node.kill()
        raise
    return [nodes[place] for place in range(len(ranks))]
