"""The greeting of two machines: each proves that it knows the secret, and their versions are
compared.

A challenge is a random number of each side. The proof is its HMAC with the secret as the key (RFC
2104). Nothing but two hexadecimal numbers and the length of a text is believed before the proof,
and the whole greeting is bounded in bytes and in seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
import re
import secrets
import socket
import time
from typing import TypeGuard

import tvm

from ..ir.compat import installed_version

#: The longest line of a greeting in bytes. A greeting has two lines of each side.
LONGEST = 4096

#: The seconds that a whole greeting may take. A machine that knows the secret answers at once.
SECONDS = 10.0

#: The fewest characters of a secret.
SHORTEST_SECRET = 16

#: A challenge or a proof: 32 bytes.
_NUMBER = re.compile("[0-9a-f]{64}")


class Refused(ConnectionError):
    """The other side is no part of this session: its secret is wrong, or it speaks another
    protocol."""


class Unanswered(Refused):
    """The other side has closed the connection, or has not answered in time."""


class VersionMismatch(ConnectionError):
    """Both sides know the secret, but run different versions.

    Attributes
    ----------
    host : str
        The name of the other machine.
    """

    def __init__(self, host: str, difference: str):
        self.host = host
        super().__init__(f"{host} runs other versions: {difference}")


def check_secret(secret: object) -> str:
    """Return a secret, or raise an error that says how to set one."""
    if not isinstance(secret, str):
        raise TypeError(f"secret must be a string, but it is {type(secret).__name__}")
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(
            f"secret must have at least {SHORTEST_SECRET} characters, but it has {len(secret)}; "
            "make one with: "
            'python -c "import secrets; print(secrets.token_hex())", and set RELAX_GRAD_SECRET '
            "on every machine"
        )
    return secret


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    return {
        "relax_grad": installed_version("relax_grad") or "unknown",
        "tvm": tvm.__version__,
        "torch": installed_version("torch") or "none",
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def welcome(connection: socket.socket, secret: str, seconds: float = SECONDS) -> dict:
    """Greet a machine that has connected to the controller, and return its introduction.

    Whatever the other side sends, this function raises nothing but the errors below, within the
    time.

    Parameters
    ----------
    seconds : float
        The seconds that the whole greeting may take.

    Raises
    ------
    Refused
        If it does not know the secret.
    VersionMismatch
        If its versions differ. It is told so.
    """
    end = time.monotonic() + seconds
    challenge = secrets.token_hex(32)
    send(connection, {"challenge": challenge}, end)
    answer = receive(connection, end)
    own, proof, text = answer.get("challenge"), answer.get("proof"), answer.get("introduction")
    if not (_is_number(own) and _is_number(proof) and isinstance(text, str) and text.isascii()):
        raise Refused("it speaks another protocol")
    if not hmac.compare_digest(_proof(secret, "worker", challenge, own, text), proof):
        send(connection, {"error": "the secret is wrong"}, end)
        raise Refused("its secret is wrong")
    introduction = _introduction(text)
    there, here = introduction["versions"], versions()
    if there != here:
        difference = _difference(there, here)
        own_host = socket.gethostname()
        message = f"the versions differ from the versions on {own_host}: {difference}"
        send(connection, {"error": message}, end)
        raise VersionMismatch(_printable(introduction["host"]), _printable(difference))
    send(connection, {"proof": _proof(secret, "controller", own, challenge, "")}, end)
    connection.settimeout(None)
    return introduction


def introduce(connection: socket.socket, secret: str, more: dict, seconds: float = SECONDS) -> None:
    """Greet the controller.

    Parameters
    ----------
    more : dict
        Further values of the introduction: the ``rank`` and the ``token`` of a worker's connection,
        or the ``place`` of a machine.
    seconds : float
        The seconds that the whole greeting may take.

    Raises
    ------
    Unanswered
        If the controller closes the connection, or does not answer within the time.
    Refused
        If the controller refuses this machine, or does not know the secret itself.
    """
    end = time.monotonic() + seconds
    challenge = receive(connection, end).get("challenge")
    if not _is_number(challenge):
        raise Refused("it is no controller of relax_grad")
    own = secrets.token_hex(32)
    text = json.dumps({"versions": versions(), "host": socket.gethostname(), **more})
    proof = _proof(secret, "worker", challenge, own, text)
    send(connection, {"challenge": own, "proof": proof, "introduction": text}, end)
    answer = receive(connection, end)
    if "error" in answer:
        raise Refused(_printable(str(answer["error"])))
    answered = answer.get("proof")
    wanted = _proof(secret, "controller", own, challenge, "")
    if not _is_number(answered) or not hmac.compare_digest(wanted, answered):
        raise Refused("the controller does not know the secret")
    connection.settimeout(None)


def send(connection: socket.socket, message: dict, end: float | None = None) -> None:
    """Send a message as a line of JSON.

    Parameters
    ----------
    end : float, optional
        The time of ``time.monotonic`` at which it must have been sent.

    Raises
    ------
    Unanswered
        If it cannot be sent until then.
    """
    try:
        if end is not None:
            connection.settimeout(_left(end))
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError as error:
        raise Unanswered(f"nothing can be sent: {error}") from error


def receive(connection: socket.socket, end: float) -> dict:
    """Receive a line of JSON, and no byte after it.

    Parameters
    ----------
    end : float
        The time of ``time.monotonic`` at which it must have come.

    Raises
    ------
    Unanswered
        If the line does not come.
    Refused
        If the line is no object of JSON, or is too long.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        if len(data) >= LONGEST:
            raise Refused("its greeting is too long")
        try:
            connection.settimeout(_left(end))
            byte = connection.recv(1)
        except OSError as error:
            raise Unanswered(f"no greeting came: {error}") from error
        if not byte:
            raise Unanswered("the connection ended")
        data += byte
    return _object(data)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left


def _object(text: str | bytearray) -> dict:
    """Return an object of JSON."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise Refused("its greeting is not JSON") from error
    if not isinstance(message, dict):
        raise Refused("its greeting is no object")
    return message


def _introduction(text: str) -> dict:
    """Return the introduction of a machine that knows the secret."""
    found = _object(text)
    versions_there = found.get("versions")
    is_right = (
        isinstance(versions_there, dict)
        and all(isinstance(version, str) for version in versions_there.values())
        and isinstance(found.get("host"), str)
        and isinstance(found.get("token", ""), str)
        and all(type(found.get(name, 0)) is int for name in ("rank", "place"))
    )
    if not is_right:
        raise Refused("its introduction lacks its versions and its host, or has wrong types")
    return found


def _printable(text: str) -> str:
    """Return a text of another machine for a terminal or a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:500])


def _is_number(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _NUMBER.fullmatch(value) is not None


def _proof(secret: str, role: str, challenge: str, own: str, text: str) -> str:
    message = "\n".join((role, challenge, own, text)).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def _difference(there: dict, here: dict) -> str:
    return ", ".join(
        f"{name} {there.get(name)} there and {here.get(name)} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )
