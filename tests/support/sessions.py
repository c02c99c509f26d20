"""Sessions of workers that tests share: a start takes seconds."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import tvm

from relax_grad.distributed._memory import is_available

#: The seconds in which workers start on a busy machine.
START = 200.0


def new_session(num_workers: int, **options):
    """Return a session with one thread for each worker."""
    if options.get("nodes", 1) > 1 or not (options.get("shared_memory", True) and is_available()):
        pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    from relax_grad.distributed import session

    options = {"threads": 1, "timeout": 60.0, "start_timeout": START, **options}
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *paths]))
        return session(num_workers, **options)


def scatter(session, arrays):
    """Return a reference to one array on each worker: a list of arrays of the same shape and
    dtype."""
    reference = session.empty(arrays[0].shape, str(arrays[0].dtype))
    for rank, array in enumerate(arrays):
        reference.debug_copy_from(rank, tvm.runtime.tensor(array))
    return reference


def values(session, reference) -> list[np.ndarray]:
    """Return the array of each worker."""
    session.synchronize()
    arrays = [reference.debug_get_from_remote(rank) for rank in range(session.num_workers)]
    return [value if isinstance(value, np.ndarray) else value.numpy() for value in arrays]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def is_running(pid: int) -> bool:
    """Tell whether a process runs; one that has ended but is not reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def assert_ended(pids, seconds: float = 10.0) -> None:
    """Assert that processes other than this one end soon."""
    end = time.monotonic() + seconds
    left = [pid for pid in pids if pid != os.getpid()]
    while left and time.monotonic() < end:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.05)
    assert not left
