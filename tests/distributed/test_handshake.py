"""The greeting of two machines."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import one_by_one

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
            assert rb"\"rank\": 1" in data or not data.startswith(b'{"challenge": ')
            self._connection.sendall(data.replace(rb"\"rank\": 1", rb"\"rank\": 2"))

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


STRANGERS = {
    "nothing": b"",
    "an empty line": b"\n",
    "a list": b"[]\n",
    "no proof": b"{}\n",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "no text": b'{"challenge": 1}\n',
    "a long line": b"x" * 5000,
    "deep": b"[" * 4000 + b"\n",
    "no ASCII": '{"challenge": "a", "proof": "é", "introduction": ""}\n'.encode(),
    "half a pair": rb'{"challenge": "\ud800", "proof": "a", "introduction": ""}' + b"\n",
    "a long integer": b'{"challenge": ' + b"1" * 4070 + b"}\n",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_refused(name):
    data = STRANGERS[name]

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


def test_the_reason_of_a_refusal_is_one_line_of_printable_text():
    answer = line(error="\x1b[2Jno\nmore" + "x" * 2000)
    peer = Peer(answer, first=line(challenge="0" * 64))
    with pytest.raises(Refused, match=r"^\?\[2Jno\?morex+$") as error:
        _handshake.introduce(peer, SECRET, {})
    assert len(str(error.value)) == 500


def test_secrets():
    assert check_secret(SECRET) == SECRET
    with pytest.raises(ValueError, match="at least 16 characters, but it has 3; make one with"):
        check_secret("abc")
    with pytest.raises(TypeError, match="must be a string"):
        check_secret(None)


class Peer:
    """The other side of a greeting: it answers each line with a stream of bytes, ``delay`` seconds
    of its own clock before each byte, and counts the bytes that are read."""

    def __init__(self, *answers, delay=0.0, first=b""):
        self._answers, self._stream = list(answers), first
        self._delay, self._timeout = delay, None
        self.now, self.read, self.sent = 0.0, 0, []

    def monotonic(self):
        return self.now

    def settimeout(self, seconds):
        assert seconds is None or seconds > 0
        self._timeout = seconds

    def sendall(self, data):
        assert self._timeout is not None
        self.sent.append(json.loads(data))
        if self._answers:
            answer = self._answers.pop(0)
            self._stream += answer(self.sent[-1]) if callable(answer) else answer

    def recv(self, size):
        assert self._timeout is not None
        if self._delay > self._timeout:
            self.now += self._timeout
            raise TimeoutError("timed out")
        self.now += self._delay
        data, self._stream = self._stream[:size], self._stream[size:]
        self.read += len(data)
        return data


def line(**message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def right_answer(text: str, secret: str = SECRET):
    """Return the answer of a machine with an introduction, as a function of the first line."""

    def answer(message):
        proof = _handshake._proof(secret, "worker", message["challenge"], "0" * 64, text)
        return line(challenge="0" * 64, proof=proof, introduction=text)

    return answer


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=9), values, max_size=3)
    ),
    max_leaves=5,
)
NUMBERS = st.sampled_from(["0" * 64, "é" * 64, "\ud800", "0" * 63, "A" * 64]) | JSON
INTRODUCTIONS = st.fixed_dictionaries(
    {},
    optional={
        "versions": st.just(_handshake.versions()) | st.dictionaries(st.text(max_size=5), JSON),
        "host": JSON | st.just("machine"),
        "rank": st.integers() | JSON,
        "token": st.text(max_size=5) | JSON,
        "place": st.integers() | JSON,
    },
)
TEXTS = st.one_of(
    INTRODUCTIONS.map(json.dumps), JSON.map(json.dumps), st.text(max_size=20), st.just("[" * 3000)
)


def damaged(answer, at: float, length: int, new: bytes):
    """Replace some bytes of an answer."""

    def changed(message):
        data = answer(message)
        start = int(at * len(data))
        return data[:start] + new + data[start + length :]

    return changed


ANSWERS = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=5).map(lambda data: data * 1000),
    st.sampled_from([b"[", b'{"a":', b"9", b'"']).map(lambda data: (data * 4095)[:4095] + b"\n"),
    st.builds(
        line, challenge=NUMBERS, proof=NUMBERS, introduction=TEXTS | JSON, error=JSON, more=JSON
    ),
    st.builds(right_answer, TEXTS),
    st.builds(right_answer, TEXTS, st.just(SECRET[::-1])),
    st.builds(
        damaged,
        st.builds(right_answer, INTRODUCTIONS.map(json.dumps)),
        st.floats(0, 1),
        st.integers(0, 20),
        st.binary(max_size=20),
    ),
)
DELAYS = st.sampled_from([0.0, 0.0, 0.001, 0.02, 5.0, 9.999, 11.0])


def greet_one(answer, delay):
    """The controller's side ends within its bounds, and accepts right introductions only."""
    peer = Peer(answer, delay=delay)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_handshake, "time", peer)
        try:
            introduction = _handshake.welcome(peer, SECRET)
        except Refused:
            assert "proof" not in peer.sent[-1]
        except VersionMismatch:
            assert "the versions differ" in peer.sent[-1]["error"]
        else:
            assert introduction["versions"] == _handshake.versions()
            assert isinstance(introduction["host"], str)
            assert type(introduction.get("rank", 0)) is type(introduction.get("place", 0)) is int
    assert peer.read <= _handshake.LONGEST
    assert peer.now <= _handshake.SECONDS + 1e-6


def greet_controller(first, answer, delay):
    """A machine refuses everything but a controller that knows the secret, within the bounds."""
    peer = Peer(answer, delay=delay, first=first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_handshake, "time", peer)
        with pytest.raises(Refused):
            _handshake.introduce(peer, SECRET, {})
    assert peer.read <= 2 * _handshake.LONGEST
    assert peer.now <= _handshake.SECONDS + 1e-6


FIRST = st.one_of(ANSWERS.filter(lambda e: isinstance(e, bytes)), st.just(line(challenge="0" * 64)))
ANY = ANSWERS.map(lambda e: e if isinstance(e, bytes) else e({"challenge": "0" * 64}))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ANSWERS, DELAYS)
def test_no_stream_passes_or_stops_the_controller(answer, delay):
    greet_one(answer, delay)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(FIRST, ANY, DELAYS)
def test_no_stream_passes_or_stops_a_machine(first, answer, delay):
    greet_controller(first, answer, delay)


@pytest.mark.slow
@one_by_one(4000)
@given(ANSWERS, DELAYS)
def test_thousands_of_streams_to_the_controller(answer, delay):
    greet_one(answer, delay)


@pytest.mark.slow
@one_by_one(2000)
@given(FIRST, ANY, DELAYS)
def test_thousands_of_streams_to_a_machine(first, answer, delay):
    greet_controller(first, answer, delay)


def test_the_fuzzed_sides_accept_each_other():
    """The peers of the fuzzer differ from right ones in their bytes only."""
    text = json.dumps({"versions": _handshake.versions(), "host": "machine", "rank": 1})
    peer = Peer(right_answer(text))
    assert _handshake.welcome(peer, SECRET)["rank"] == 1
    assert set(peer.sent[-1]) == {"proof"}
