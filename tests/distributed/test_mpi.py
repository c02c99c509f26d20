"""The backend of MPI, in programs that ``mpiexec`` starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import START, assert_ended

import relax_grad
from relax_grad.distributed import session

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def run():
    """Return a function that runs a task of ``mpi_program.py`` by some processes, or, for none,
    by one that ``mpiexec`` did not start."""
    pytest.importorskip("mpi4py", reason="the package mpi4py is not installed: extra mpi")
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    mpiexec = shutil.which("mpiexec", path=paths)
    if mpiexec is None:
        pytest.skip("there is no mpiexec beside mpi4py: install a library of MPI, such as mpich")

    def run(task: str, count: int):
        places = [str(SUPPORT), str(Path(relax_grad.__file__).parents[1])]
        places += os.environ.get("PYTHONPATH", "").split(os.pathsep)
        program = [sys.executable, str(SUPPORT / "mpi_program.py"), task, str(count or 2)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PATH": paths}
        return subprocess.run(
            [mpiexec, "-n", str(count), *program] if count else program,
            env=env,
            capture_output=True,
            text=True,
            timeout=START,
        )

    return run


def lines(process: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_and_training(run, count):
    """Four processes also run in two groups, with divided layers."""
    process = run("checks", count)
    assert process.returncode == 0, process.stdout + process.stderr
    results = lines(process)
    assert len(results) == (1 if count == 2 else 2)
    for result in results:
        assert set(result["reductions"].values()) == {0.0}
        assert all(result["moves"].values()), result["moves"]
        assert max(result["training"]) < 1e-7  # weights of unequal shares are float32


@pytest.mark.parametrize("task", ["fails", "is killed"])
def test_failures_end_all_processes(run, task):
    """The error names the worker, and ``mpiexec`` fails."""
    process = run(task, 2)
    assert process.returncode != 0
    pids, *others = lines(process)
    assert_ended(pids.values())
    if task == "fails":
        assert others[0]["rank"] in (0, 1)
        assert "no such task" in others[0]["cause"]


def test_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        ImportError, match=r"the backend mpi needs mpi4py .* pip install 'mpi4py>=4' mpich"
    ):
        session(2, "mpi")
    with pytest.raises(ValueError, match="mpiexec places the processes"):
        session(2, "mpi", nodes=2, secret="a secret of 32 characters, or so")


def test_a_program_without_mpiexec(run):
    """In a process of its own: MPI listens at the address of the host until its process ends."""
    process = run("checks", 0)
    assert process.returncode == 1
    message = "MPI has 1 processes; start the program with: mpiexec -n 2"
    assert "ValueError: " in process.stderr
    assert message in process.stderr
