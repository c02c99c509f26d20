"""Connections that come to a controller at the same time."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from relax_grad.distributed import WorkerError, _handshake, _reception
from relax_grad.distributed._nodes import accept_nodes, listening_socket
from relax_grad.distributed._reception import Came, Reception

SECRET = "a secret of 32 characters, or so"

ASSIGNMENT = {
    "num_workers": 2,
    "num_groups": 1,
    "threads": 1,
    "shares_memory": False,
    "timeout": 9,
    "restarts": False,
}


@pytest.fixture
def door():
    """Return a reception, and a function that connects to it."""
    held = []
    with listening_socket("127.0.0.1", 0) as listening:
        reception = Reception(listening, SECRET)

        def connect(data=b"", **introduction):
            connection = socket.create_connection(listening.getsockname(), 10)
            held.append(connection)
            if introduction:
                _handshake.introduce(connection, SECRET, introduction)
            elif data:
                connection.sendall(data)
            return connection

        yield reception, connect
        reception.close()
    for connection in held:
        connection.close()


def test_strangers_neither_stop_nor_delay_a_machine(door, caplog):
    """Ten silent ones are greeted beside the right one; the others are lines of the log."""
    reception, connect = door
    for data in (b"[" * 4000 + b"\n", '{"proof": "é"}\n'.encode(), b"\0" * 5000, b"{}\n"):
        connect(data)
    for _ in range(10):
        connect()
    start = time.monotonic()
    threading.Thread(target=connect, kwargs={"rank": 7}).start()
    connection, introduction = reception.next(30.0)
    connection.close()
    assert introduction["rank"] == 7
    assert time.monotonic() - start < 0.5 * _handshake.SECONDS
    end = time.monotonic() + 5
    while len(reception.refused) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(caplog.messages) == 4
    assert all(text.startswith("refused a connection from 127.0.0.1: ") for text in caplog.messages)


def test_the_oldest_greeting_ends_if_there_are_too_many(door, monkeypatch):
    monkeypatch.setattr(_reception, "MOST", 3)
    reception, connect = door
    silent = [connect() for _ in range(6)]
    threading.Thread(target=connect, kwargs={"rank": 7}).start()
    assert reception.next(30.0)[1]["rank"] == 7
    for connection in silent[:3]:
        connection.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    assert len(reception._pending) <= 3


def test_an_error_of_the_greeting_is_a_line_of_the_log(door, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("unexpected")

    monkeypatch.setattr(_handshake, "welcome", fail)
    reception, connect = door
    connect()
    assert reception.next(0.5) is None
    assert caplog.messages == ["refused a connection from 127.0.0.1: RuntimeError: unexpected"]


def test_the_end_closes_waiting_connections(door):
    reception, connect = door
    silent = connect()
    silent.settimeout(10)
    assert b"challenge" in silent.recv(4096)
    threads = threading.active_count()
    reception.close()
    assert silent.recv(1) == b""
    end = time.monotonic() + 5
    while threading.active_count() > threads - 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= threads - 2  # of the reception and of the greeting


def test_a_machine_that_ends_early_gives_its_place_to_another_one(door, caplog):
    """Connections with a rank, a token or a place that is not awaited are closed."""
    reception, connect = door
    right = []

    def come():
        for more in ({"rank": 1, "token": "other"}, {"rank": -5}, {"place": 3}):
            connect(**more)
        first = connect(place=0)
        own = _handshake.receive(first, time.monotonic() + 20)
        first.close()
        second = connect(place=0)
        own = _handshake.receive(second, time.monotonic() + 20)
        assert own["ranks"] == [1]
        connect(rank=1, token=own["token"])
        right.append(second)

    other = threading.Thread(target=come)
    other.start()
    (node,) = accept_nodes(Came(reception, []), [[1]], ASSIGNMENT, 40.0)
    other.join()
    assert right
    assert list(node.channels()) == [1]
    assert "has ended before its workers have started" in caplog.text
    node.kill()


def test_the_wait_ends_in_time(door):
    """A stranger that sends a byte now and then does not prolong it."""
    reception, connect = door
    stranger, is_over = connect(), threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                stranger.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"0 of 1 other machines have connected within 0\.4 s"):
        accept_nodes(Came(reception, []), [[1]], ASSIGNMENT, 0.4)
    assert time.monotonic() - start < 3
    is_over.set()
    thread.join()


@pytest.mark.slow
def test_hundreds_of_streams_at_once(door):
    """While strangers come and go, each machine is greeted."""
    reception, connect = door
    is_over = threading.Event()

    def disturb():
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                connect(os.urandom(300)).close()
                connect(b'{"challenge": "0')

    strangers = [threading.Thread(target=disturb) for _ in range(3)]
    for thread in strangers:
        thread.start()
    try:
        for rank in range(20):
            connect_thread = threading.Thread(target=connect, kwargs={"rank": rank})
            connect_thread.start()
            assert reception.next(30.0)[1]["rank"] == rank
            connect_thread.join()
    finally:
        is_over.set()
        for thread in strangers:
            thread.join()
