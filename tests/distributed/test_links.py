"""The ends of connections and of processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from sessions import START, assert_ended, is_running, values

from relax_grad.distributed._links import keep_alive, wait_for_end

SECRET = "a secret of 32 characters, or so"


@pytest.mark.parametrize("seconds", [0.5, 15.0, 300.0, 1e7])
def test_a_connection_fails_if_the_network_is_gone(seconds):
    with socket.socket() as connection:
        keep_alive(connection, seconds)
        get = connection.getsockopt
        assert get(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = min(seconds * 1000, 2**31 - 1)
            assert get(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds
        if hasattr(socket, "TCP_KEEPIDLE") and 2 <= seconds < 2**15:
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, between, probes = (get(socket.IPPROTO_TCP, name) for name in names)
            assert 0.8 * seconds <= idle + between * probes <= seconds


def test_the_wait_for_the_end_of_a_parent():
    reader, writer = os.pipe()
    other = subprocess.Popen(["sleep", "100"])
    threading.Timer(0.1, os.close, (writer,)).start()
    wait_for_end(reader, other.pid)  # the pipe ends
    os.close(reader)
    assert other.poll() is None
    if hasattr(os, "pidfd_open"):
        reader, writer = os.pipe()
        threading.Timer(0.1, other.kill).start()
        wait_for_end(reader, other.pid)  # the process ends, and the pipe does not
        assert other.wait() == -signal.SIGKILL
        wait_for_end(reader, other.pid)  # it has ended before
        os.close(reader)
        os.close(writer)
    other.kill()
    other.wait()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_of_a_fork_leaves_the_session(pair):
    """It neither ends the workers nor writes to them, and says that the session is another
    process's."""
    x = pair.broadcast(np.ones(3, "float32"))
    pair.synchronize()
    child = os.fork()
    if not child:
        code = 1
        try:
            try:
                pair.synchronize()
            except RuntimeError as error:
                code = 0 if f"belongs to the process {os.getppid()}" in str(error) else 2
            del x
            pair.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for value in values(pair, x):
        np.testing.assert_array_equal(value, [1, 1, 1])


#: A program with a session and a forked child, which lives longer. A fork without Python's
#: handlers is that of a library in C.
FORKS = textwrap.dedent("""
    import ctypes, os, sys, time
    from relax_grad.distributed import session
    workers = session(2, timeout=100)
    fork = ctypes.CDLL(None).fork if sys.argv[1] == "in C" else os.fork
    child = fork()
    if child:
        print(workers.pids[1], child, flush=True)
    time.sleep(100)
""")


@pytest.mark.parametrize("kind", ["in C", pytest.param("in Python", marks=pytest.mark.slow)])
def test_workers_end_with_the_controller_and_not_with_its_children(kind):
    if kind == "in C" and not hasattr(os, "pidfd_open"):
        pytest.skip("only Linux tells the end of a process to others")
    program = subprocess.Popen(
        [sys.executable, "-c", FORKS, kind], stdout=subprocess.PIPE, text=True
    )
    try:
        worker, child = map(int, program.stdout.readline().split())
        program.kill()
        program.wait()
        assert_ended([worker])
        assert is_running(child)
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
    os.kill(child, signal.SIGKILL)


CONTROLLER = textwrap.dedent("""
    import sys
    from relax_grad.distributed import WorkerError, session
    workers = session(2, nodes=2, listen="10.251.0.1:4000", timeout=6, threads=1)
    workers.synchronize()
    print("started", flush=True)
    sys.stdin.readline()
    try:
        workers.synchronize()
    except WorkerError as error:
        print(error, flush=True)
""")


def namespaces(*commands):
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture
def link():
    """Return the names of two networks with a link between them."""
    if not shutil.which("ip") or os.getuid():
        pytest.skip("networks of processes need the command ip and the rights of root")
    here, there = f"relax-a{os.getpid()}", f"relax-b{os.getpid()}"
    try:
        namespaces(f"netns add {here}", f"netns add {there}")
    except subprocess.CalledProcessError:
        pytest.skip("this system gives no networks to processes")
    namespaces(
        f"link add va netns {here} type veth peer name vb netns {there}",
        f"-n {here} addr add 10.251.0.1/24 dev va",
        f"-n {there} addr add 10.251.0.2/24 dev vb",
        f"-n {here} link set lo up",
        f"-n {there} link set lo up",
        f"-n {here} link set va up",
        f"-n {there} link set vb up",
    )
    yield here, there
    namespaces(f"netns del {here}", f"netns del {there}")


@pytest.mark.slow
def test_both_machines_notice_that_the_link_is_down(link):
    """The machine and its worker end within the timeout of the session, 6 s, and some more; the
    controller's next call is an error."""
    pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    here, there = link
    inside = ["ip", "netns", "exec"]
    env = {**os.environ, "RELAX_GRAD_SECRET": SECRET}
    machine = subprocess.Popen(
        [
            *(*inside, there, sys.executable, "-m", "relax_grad", "worker"),
            *("--controller", "10.251.0.1:4000", "--timeout", str(START)),
        ],
        env=env,
    )
    controller = subprocess.Popen(
        [*inside, here, sys.executable, "-c", CONTROLLER],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while "started" not in (line := controller.stdout.readline()):
            assert line, "the controller has ended"
        namespaces(f"-n {there} link set vb down")
        start = time.monotonic()
        assert machine.wait(30) == 1
        assert time.monotonic() - start < 15
        left = 6 + 5 - (time.monotonic() - start)
        time.sleep(max(0.0, left))
        output, _ = controller.communicate("\n", timeout=30)
        assert "the connection to its machine has ended" in output
        assert controller.returncode == 0
    finally:
        for process in (machine, controller):
            process.kill()
            process.wait()
