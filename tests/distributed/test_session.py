"""Sessions: their start, their end, and the failures of workers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from sessions import START, assert_ended, free_port, new_session, values

from relax_grad.distributed import Session, WorkerError, session
from relax_grad.distributed import node as nodes
from relax_grad.distributed._processes import Channel, address_of, cause_of, shares

SECRET = "a secret of 32 characters, or so"


def test_shares_and_addresses():
    assert shares(7, 3) == [3, 2, 2]
    assert address_of("127.0.0.1:80") == ("127.0.0.1", 80)
    for text in ("127.0.0.1", ":80", "host:", "host:70000", None):
        with pytest.raises(ValueError, match="HOST:PORT"):
            address_of(text)
    assert cause_of(-9) == "its process was ended by SIGKILL"
    assert cause_of(3) == "its process has ended with exit code 3"


def test_a_session_describes_its_workers(pair):
    assert pair.num_workers == 2
    assert pair.pids[0] == os.getpid()
    assert pair.pids[1] != os.getpid()
    assert len(pair.hosts) == 2
    assert [description["threads"] for description in pair.run("describe")] == [1, 1]


def listening(pid: int) -> set[str]:
    """Return the addresses and ports, as the system writes them, at which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        inodes |= {*re.findall(r"socket:\[(\d+)\]", link)}
    addresses = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            fields = [line.split() for line in list(file)[1:]]
        # 0A is LISTEN
        addresses |= {field[1] for field in fields if field[3] == "0A" and field[9] in inodes}
    return addresses


def test_workers_listen_on_the_loopback_interface_only(pair, gloo_pair):
    """Nothing but the loopback interface is bound by this process and its workers. A worker that
    shares memory does not listen at all."""
    assert not listening(pair.pids[1])
    addresses = listening(os.getpid()) | listening(gloo_pair.pids[1])
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert addresses
    assert {address.partition(":")[0] for address in addresses} <= loopback


def test_a_file_is_shared(pair, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(1000))
    name = "data " * 2**17  # longer than a pipe
    first, second = pair.run("share_file", path=str(path), name=name)
    assert first == second


def test_the_result_of_a_call_lives_until_the_workers_have_answered(pair, monkeypatch):
    """Its destructor writes to the workers, which would end this process if a machine had just
    ended."""
    disco, answers, results = pair.disco, pair._answers, []

    class Result:
        def __init__(self, reference):
            self.reference = reference

    class Calls:
        def call_packed(self, *arguments):
            result = Result(disco.call_packed(*arguments))
            results.append(weakref.ref(result))
            return result

    def spied(*arguments):
        replies = answers(*arguments)
        assert results[-1]() is not None
        return replies

    monkeypatch.setattr(pair, "disco", Calls())
    monkeypatch.setattr(pair, "_answers", spied)
    pair.synchronize()
    assert [reference() for reference in results] == [None]


def test_a_worker_that_hangs():
    """tests/distributed/test_elastic.py has a worker that is killed."""
    cause = "wait: no answer within 1 s"
    workers = new_session(2, timeout=1)
    x = workers.broadcast(np.ones(3, "float32"))
    workers.synchronize()
    os.kill(workers.pids[1], signal.SIGSTOP)
    start = time.monotonic()
    workers.allreduce(x, x)
    with pytest.raises(
        WorkerError, match=f"worker 1 on {re.escape(workers.hosts[1])}: {cause}"
    ) as e:
        workers.synchronize()
    assert time.monotonic() - start < 15
    assert (e.value.rank, e.value.host) == (1, workers.hosts[1])
    assert_ended(workers.pids.values())
    with pytest.raises(WorkerError, match=cause):
        workers.synchronize()
    workers.close()
    del x  # its destructor writes to the pipe of the worker


def test_a_large_command_for_a_worker_that_hangs():
    """It does not fit into a pipe. The timeout ends the wait, and Ctrl-C another one."""
    large = "x" * 2**20
    workers = new_session(2, timeout=100)
    os.kill(workers.pids[1], signal.SIGSTOP)
    reference = workers.empty((1,), "float32")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        workers.run("wait", large=large)
    with pytest.raises(WorkerError, match="wait: the call was interrupted"):
        workers.synchronize()
    workers = new_session(2, timeout=0.5)
    os.kill(workers.pids[1], signal.SIGSTOP)
    reference = workers.empty((1,), "float32")
    with pytest.raises(WorkerError, match=r"worker 1 on .*: wait: no answer within 0\.5 s"):
        workers.run("wait", large=large)
    assert time.monotonic() - start < 60
    assert_ended(workers.pids.values())
    del reference


@pytest.mark.slow
def test_an_interrupted_end_ends_the_workers(monkeypatch):
    workers = new_session(2, timeout=100)
    monkeypatch.setattr(workers._nodes[0], "close", lambda seconds: signal.raise_signal(2))
    with pytest.raises(KeyboardInterrupt):
        workers.close()
    assert_ended(workers.pids.values())
    workers.close()


@pytest.mark.slow
def test_functions_of_disco_end_with_the_timeout():
    """Such as a read of a value of a stopped worker."""
    workers = new_session(2, timeout=0.5)
    x = workers.broadcast(np.ones(3, "float32"))
    workers.synchronize()
    os.kill(workers.pids[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(Exception, match=r"."):
        x.debug_get_from_remote(1)
    assert time.monotonic() - start < 30
    with pytest.raises(WorkerError, match=r"worker 1 on .*: no answer within 0\.5 s: it takes no"):
        workers.synchronize()
    assert_ended(workers.pids.values())


def test_other_machines(monkeypatch):
    """Two nodes, both on this machine. A stranger and a wrong secret do not stop the start."""
    pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    monkeypatch.setenv("RELAX_GRAD_SECRET", SECRET)
    port = free_port()
    command = [sys.executable, "-m", "relax_grad", "worker", "--timeout", str(START)]
    wrong = subprocess.Popen(
        [*command, "--controller", f"127.0.0.1:{port}"],
        env={**os.environ, "RELAX_GRAD_SECRET": SECRET[::-1]},
        stderr=subprocess.PIPE,
        text=True,
    )
    started = []

    def start_the_other() -> None:
        """Start the node that knows the secret after the controller, which closes its port then,
        has refused the other."""
        wrong.wait(START)
        started.append(subprocess.Popen([*command, "--controller", f"127.0.0.1:{port}"]))

    starter = threading.Thread(target=start_the_other)
    starter.start()
    try:
        workers = new_session(2, nodes=2, listen=f"127.0.0.1:{port}", timeout=20)
        starter.join()
        (right,) = started
        x = workers.broadcast(np.arange(3.0))
        for value in values(workers, x):
            np.testing.assert_array_equal(value, [0, 1, 2])
        assert "secret is wrong" in wrong.communicate(timeout=START)[1]
        assert wrong.returncode == 1
        # References that are freed between the end of a machine and its notice must not end this
        # process.
        references = [workers.empty((1,), "float32") for _ in range(200)]
        workers.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "silence", lambda self: None)
            right.kill()
            right.wait()
            assert_ended(workers.pids.values())
            references.clear()
        with pytest.raises(WorkerError, match="the connection to its machine has ended"):
            workers.synchronize()
        assert_ended(workers.pids.values())
    finally:
        wrong.kill()
        starter.join()
        for process in (wrong, *started):
            process.kill()
            process.wait()


#: A machine that claims another version of PyTorch.
OTHER_VERSION = """
import sys
from relax_grad.distributed import _handshake, node
own = _handshake.versions()
_handshake.versions = lambda: {**own, "torch": "1.0.0"}
node.serve(*sys.argv[1:], 200.0)
"""


def test_a_machine_with_other_versions():
    """Both sides name the machine and both versions, before a worker has started."""
    torch = pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    port = free_port()
    address, host = f"127.0.0.1:{port}", socket.gethostname()
    command = [sys.executable, "-c", OTHER_VERSION, address, SECRET]
    other = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        differs = f"torch 1.0.0 there and {torch.__version__} here"
        message = re.escape(f"{host} runs other versions: {differs}")
        with pytest.raises(WorkerError, match=message) as error:
            session(2, nodes=2, listen=address, secret=SECRET, start_timeout=START)
        assert error.value.host == host
        assert (
            f"the versions differ from the versions on {host}: {differs}" in other.communicate()[1]
        )
        assert other.returncode == 1
    finally:
        other.kill()
        other.wait()


#: A program whose workers end at once, while worker 0 waits for them.
NO_WORKERS = """
import sys
from relax_grad.distributed import WorkerError, session
sys.executable = "/bin/false"
try:
    session(3, start_timeout=100.0)
except WorkerError as error:
    print(error.cause)
"""


def test_workers_that_do_not_start():
    """The error comes at once, and the program goes on and ends by itself."""
    pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    start = time.monotonic()
    command = [sys.executable, "-c", NO_WORKERS]
    process = subprocess.run(command, capture_output=True, text=True, timeout=START)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "its process has ended with exit code 1\n"
    assert time.monotonic() - start < 90


def test_machines_that_do_not_come():
    pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    with pytest.raises(WorkerError, match=r"0 of 1 other machines have connected within 0\.5 s"):
        session(2, nodes=2, secret=SECRET, start_timeout=0.5)
    with pytest.raises(ConnectionError, match=r"no controller answers at 127\.0\.0\.1"):
        nodes.serve(f"127.0.0.1:{free_port()}", SECRET, 0.6)


def test_a_port_in_use():
    pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen at {address}: .*choose a free port"):
            session(2, nodes=2, listen=address, secret=SECRET)


CASES = {
    "no worker": ({"num_workers": 0}, ValueError, "num_workers must be a positive integer"),
    "half a worker": ({"num_workers": 1.5}, TypeError, "num_workers must be an integer"),
    "a library": ({"backend": "rccl"}, ValueError, 'backend must be "gloo"'),
    "no NCCL": ({"backend": "nccl"}, ValueError, "without NCCL"),
    "groups": ({"num_groups": 3}, ValueError, "num_groups must divide num_workers"),
    "nodes": ({"nodes": 3}, ValueError, "each node needs a worker"),
    "threads": ({"threads": 0}, ValueError, "threads must be a positive integer"),
    "a timeout": ({"timeout": -1}, ValueError, "timeout must be a positive number of seconds"),
    "a short secret": ({"nodes": 2, "secret": "abc"}, ValueError, "at least 16 characters"),
    "an address": ({"listen": "here"}, ValueError, "HOST:PORT"),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments(name):
    arguments, error, message = CASES[name]
    if "NCCL" in name:
        pytest.importorskip("tvm")
    with pytest.raises(error, match=message):
        session(**{"num_workers": 2, **arguments})


def test_an_ended_session_names_the_block_of_its_trainers():
    ended = SimpleNamespace(_process=os.getpid(), _failure=None, _ended=True)
    with pytest.raises(RuntimeError, match=r"use its trainers within with session\(2\) as workers"):
        Session._check_open(ended)
