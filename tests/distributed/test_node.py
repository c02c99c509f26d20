"""A machine that takes work from a controller, here a thread, which gives it no workers."""

from __future__ import annotations

import json
import threading
import time

import pytest

from relax_grad.distributed import _handshake, node
from relax_grad.distributed._handshake import Refused
from relax_grad.distributed._nodes import listening_socket

SECRET = "a secret of 32 characters, or so"


def closes(connection):
    """Close the connection without a greeting."""


def greets(*lines):
    """Return a controller that sends these lines after the greeting."""

    def controller(connection):
        _handshake.welcome(connection, SECRET)
        for line in lines:
            connection.sendall(json.dumps(line).encode() + b"\n")
            if "ranks" in line:
                time.sleep(0.05)

    return controller


def assigns(restarts: bool) -> dict:
    return {"ranks": [], "shares_memory": False, "timeout": 9, "restarts": restarts}


@pytest.fixture
def served(monkeypatch):
    """Return a function that serves controllers, one after the other, and returns the exit code or
    the error."""
    monkeypatch.setattr(node, "_PAUSE", 0.01)

    def served(*controllers):
        with listening_socket("127.0.0.1", 0) as listening:
            listening.settimeout(20)

            def control():
                for controller in controllers:
                    with listening.accept()[0] as connection:
                        controller(connection)
                listening.close()

            thread = threading.Thread(target=control)
            thread.start()
            try:
                host, port = listening.getsockname()
                return node.serve(f"{host}:{port}", SECRET, 5.0)
            except OSError as error:
                return error
            finally:
                thread.join()

    return served


def test_the_end_of_a_session(served):
    """With another session to follow, the machine comes again."""
    last, again = {"end": 0.0, "again": False}, {"end": 0.0, "again": True}
    assert served(greets(assigns(False), last)) == 0
    assert served(greets(assigns(False))) == 1
    assert served(greets(assigns(True), again), greets(assigns(True), last)) == 0
    assert served(greets(assigns(True)), closes, greets(assigns(False), last)) == 0
    for wrong in ({"end": "x", "again": False}, {"end": 1e308, "again": False}, {}, []):
        start = time.monotonic()
        assert served(greets(assigns(False), wrong)) in (0, 1)
        assert time.monotonic() - start < 5


def test_a_machine_that_is_not_needed_tries_again(served):
    last = {"end": 0.0, "again": False}
    later = greets({"later": True})
    assert served(closes, later, later, greets(assigns(True), last)) == 0


def test_refusals_end_the_machine(served):
    error = served(greets())
    assert isinstance(error, Refused)
    assert "it has enough machines" in str(error)

    def refuses(connection):
        with pytest.raises(Refused):
            _handshake.welcome(connection, SECRET[::-1])

    error = served(refuses)
    assert isinstance(error, Refused)
    assert "the secret is wrong" in str(error)
