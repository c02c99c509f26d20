"""The greeting of two machines."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest

from relax_grad.distributed import _handshake
from relax_grad.distributed._handshake import Refused, VersionMismatch, check_secret

SECRET = "a secret of 32 characters, or so"


def greeting(other):
    """Run the controller's side, and ``other`` on a connection to it; return the results or errors
    of both."""
    here, there = socket.socketpair()
    outcomes = []

    def controller():
        try:
            outcomes.append(_handshake.welcome(here, SECRET))
        except (Refused, VersionMismatch) as error:
            outcomes.append(error)
        here.close()

    thread = threading.Thread(target=controller)
    thread.start()
    try:
        result = other(there)
    except Refused as error:
        result = error
    there.close()
    thread.join(15)
    assert not thread.is_alive()
    return outcomes[0], result


def test_both_sides_know_the_secret():
    outcome, result = greeting(lambda c: _handshake.introduce(c, SECRET, {"rank": 3}))
    assert result is None
    assert outcome["rank"] == 3
    assert outcome["versions"] == _handshake.versions()


def test_a_wrong_secret_is_refused_on_both_sides():
    outcome, result = greeting(lambda c: _handshake.introduce(c, SECRET[::-1], {}))
    assert isinstance(outcome, Refused)
    assert "secret is wrong" in str(outcome)
    assert "secret is wrong" in str(result)


def test_the_introduction_cannot_be_changed_on_the_way():
    class Changing:
        """A connection that changes the introduction."""

        def __init__(self, connection):
            self._connection = connection

        def sendall(self, data):
            self._connection.sendall(data.replace(b'"rank": 1', b'"rank": 2'))

        def __getattr__(self, name):
            return getattr(self._connection, name)

    outcome, _ = greeting(lambda c: _handshake.introduce(Changing(c), SECRET, {"rank": 1}))
    assert isinstance(outcome, Refused)


def test_other_versions_are_named(monkeypatch):
    own = _handshake.versions()
    versions = iter([{**own, "tvm": "0.26.0"}, own])  # first those of the other machine
    monkeypatch.setattr(_handshake, "versions", lambda: next(versions))
    outcome, result = greeting(lambda c: _handshake.introduce(c, SECRET, {}))
    assert isinstance(outcome, VersionMismatch)
    assert f"tvm 0.26.0 there and {own['tvm']} here" in str(outcome)
    assert "tvm 0.26.0 there" in str(result)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"[]\n", b"{}\n", b"GET / HTTP/1.1\r\n\r\n", b'{"challenge": 1}\n', b"x" * 5000],
    ids=["nothing", "an empty line", "a list", "no proof", "HTTP", "no text", "a long line"],
)
def test_strangers_are_refused(data):
    def other(connection):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        # The controller closes the connection with unread bytes, which resets it.
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass

    outcome, _ = greeting(other)
    assert isinstance(outcome, Refused)


def test_a_controller_without_the_secret_is_refused():
    """A machine that listens at the controller's address gets no work done."""
    here, there = socket.socketpair()
    _handshake.send(here, {"challenge": "0" * 64})
    _handshake.send(here, {"proof": "0" * 64})
    with pytest.raises(Refused, match="does not know the secret"):
        _handshake.introduce(there, SECRET, {})
    sent = here.recv(4096)
    assert SECRET.encode() not in sent
    assert set(json.loads(sent)) == {"challenge", "proof", "introduction"}
    here.close()
    there.close()


def test_secrets():
    assert check_secret(SECRET) == SECRET
    with pytest.raises(ValueError, match="at least 16 characters, but it has 3; make one with"):
        check_secret("abc")
    with pytest.raises(TypeError, match="must be a string"):
        check_secret(None)
