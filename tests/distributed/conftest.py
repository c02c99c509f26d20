"""Sessions that the tests of a module share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import START, assert_ended, new_session

import relax_grad

HERE = Path(__file__).parent


@pytest.fixture(scope="package")
def pair():
    """Return a session of two workers."""
    with new_session(2) as session:
        yield session
        pids = list(session.pids.values())
    assert_ended(pids)


@pytest.fixture(scope="package")
def gloo_pair():
    """Return a session of two workers whose bytes gloo moves, as between machines."""
    with new_session(2, shared_memory=False) as session:
        yield session
        pids = list(session.pids.values())
    assert_ended(pids)


@pytest.fixture(scope="package")
def mpiexec():
    """Return a function that runs a task of ``mpi_program.py`` by some processes, or, for none,
    by one that ``mpiexec`` did not start. Further arguments are the task's."""
    pytest.importorskip("mpi4py", reason="the package mpi4py is not installed: extra mpi")
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = shutil.which("mpiexec", path=paths)
    if command is None:
        pytest.skip("there is no mpiexec beside mpi4py: install a library of MPI, such as mpich")

    def run(task: str, count: int, *more: str):
        places = [str(HERE.parent / "support"), str(Path(relax_grad.__file__).parents[1])]
        places += os.environ.get("PYTHONPATH", "").split(os.pathsep)
        program = [
            sys.executable,
            str(HERE / "mpi_program.py"),
            task,
            str(count or 2),
            *more,
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PATH": paths}
        return subprocess.run(
            [command, "-n", str(count), *program] if count else program,
            env=env,
            capture_output=True,
            text=True,
            timeout=2 * START,
        )

    return run
