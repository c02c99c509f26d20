"""The example of digits on two hosts by two commands: network namespaces, which share no interface,
or two loopback addresses."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import START, free_port

ROOT = Path(__file__).parents[2]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces():
    """Return the commands that run a program on each of two hosts, and the address of the first
    one."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip of iproute2")
    token = secrets.token_hex(3)
    names, ends = [f"rg{token}{i}" for i in "ab"], [f"v{token}{i}" for i in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this user may not make network namespaces: {error.stderr.strip()}")
        for i, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.83.0.{i}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names], "10.83.0.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def loopback():
    """Return the same for one host with two addresses."""
    if sys.platform != "linux":
        pytest.skip("other systems than Linux have no 127.0.0.2 by default")
    return [[], []], "127.0.0.2"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["namespaces", "loopback"])
def test_digits_on_two_hosts(request, kind):
    for package in ("torch", "sklearn", "safetensors"):
        pytest.importorskip(package, reason=f"a package of the example is not installed: {package}")
    (first, second), host = request.getfixturevalue(kind)
    address = f"{host}:{free_port()}"
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RELAX_GRAD_SECRET": secrets.token_hex(),
    }
    example = str(ROOT / "examples" / "distributed_digits.py")
    training = ["--epochs", "1", "--workers", "2", "--nodes", "2", "--listen", address]
    commands = (
        [*first, sys.executable, example, *training],
        [*second, sys.executable, "-m", "relax_grad", "worker", "--controller", address],
    )
    options = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, **options) for command in commands]
    try:
        texts = [process.communicate(timeout=START)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "held out" in texts[0]
