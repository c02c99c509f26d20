"""The greeting of two machines: each proves that it knows the secret, and their versions are
compared.

A challenge is a random number of each side. The proof is its HMAC with the secret as the key (RFC
2104). Nothing else is read from a connection before the proof, and a line has a limited length.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
import secrets
import socket

import tvm

from ..ir.compat import installed_version

#: The longest line of a greeting in bytes, and the seconds that each line may take.
_LONGEST, _SECONDS = 4096, 10.0

#: The fewest characters of a secret.
SHORTEST_SECRET = 16


class Refused(ConnectionError):
    """The other side is no part of this session: its secret is wrong, or it speaks another
    protocol."""


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


def welcome(connection: socket.socket, secret: str) -> dict:
    """Greet a machine that has connected to the controller, and return its introduction.

    Raises
    ------
    Refused
        If it does not know the secret.
    VersionMismatch
        If its versions differ. It is told so.
    """
    connection.settimeout(_SECONDS)
    challenge = secrets.token_hex(32)
    send(connection, {"challenge": challenge})
    answer = receive(connection)
    own, proof = answer.get("challenge"), answer.get("proof")
    if not isinstance(own, str) or not isinstance(proof, str):
        raise Refused("it speaks another protocol")
    introduction = answer.get("introduction")
    wanted = _proof(secret, "worker", challenge, own, json.dumps(introduction, sort_keys=True))
    if not hmac.compare_digest(wanted, proof):
        send(connection, {"error": "the secret is wrong"})
        raise Refused("its secret is wrong")
    if not isinstance(introduction, dict):
        raise Refused("its introduction is no object")
    there, here = introduction["versions"], versions()
    if there != here:
        text = _difference(there, here)
        own_host = socket.gethostname()
        send(connection, {"error": f"the versions differ from those of {own_host}: {text}"})
        raise VersionMismatch(str(introduction.get("host")), text)
    send(connection, {"proof": _proof(secret, "controller", own, challenge, "")})
    connection.settimeout(None)
    return introduction


def introduce(connection: socket.socket, secret: str, more: dict) -> None:
    """Greet the controller.

    Parameters
    ----------
    more : dict
        Further values of the introduction.

    Raises
    ------
    Refused
        If the controller refuses this machine, or does not know the secret itself.
    """
    connection.settimeout(_SECONDS)
    challenge = receive(connection).get("challenge")
    if not isinstance(challenge, str):
        raise Refused("it is no controller of relax_grad")
    own = secrets.token_hex(32)
    introduction = {"versions": versions(), "host": socket.gethostname(), **more}
    proof = _proof(secret, "worker", challenge, own, json.dumps(introduction, sort_keys=True))
    send(connection, {"challenge": own, "proof": proof, "introduction": introduction})
    answer = receive(connection)
    if "error" in answer:
        raise Refused(str(answer["error"]))
    wanted = _proof(secret, "controller", own, challenge, "")
    if not hmac.compare_digest(wanted, str(answer.get("proof"))):
        raise Refused("the controller does not know the secret")
    connection.settimeout(None)


def send(connection: socket.socket, message: dict) -> None:
    """Send a message as a line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> dict:
    """Receive a line of JSON, and no byte behind it.

    Raises
    ------
    Refused
        If the line is no object of JSON, is too long, or does not come.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        try:
            byte = connection.recv(1)
        except OSError as error:
            raise Refused(f"no greeting came: {error}") from error
        if not byte or len(data) >= _LONGEST:
            raise Refused("the connection ended" if not byte else "its greeting is too long")
        data += byte
    try:
        message = json.loads(data)
    except ValueError as error:
        raise Refused("its greeting is not JSON") from error
    if not isinstance(message, dict):
        raise Refused("its greeting is no object")
    return message


def _proof(secret: str, role: str, challenge: str, own: str, text: str) -> str:
    message = "\n".join((role, challenge, own, text)).encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()


def _difference(there: dict, here: dict) -> str:
    return ", ".join(
        f"{name} {there.get(name)} there and {here.get(name)} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )
