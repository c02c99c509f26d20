"""The backend of MPI, in programs that ``mpiexec`` starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from sessions import assert_ended

from relax_grad.distributed import session


def lines(process: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_and_training(mpiexec, count):
    """Four processes also run in two groups, with divided layers."""
    process = mpiexec("checks", count)
    assert process.returncode == 0, process.stdout + process.stderr
    results = lines(process)
    assert len(results) == (1 if count == 2 else 2)
    for result in results:
        assert set(result["reductions"].values()) == {0.0}
        assert all(result["moves"].values()), result["moves"]
        assert max(result["training"]) < 1e-7  # weights of unequal shares are float32


@pytest.mark.parametrize("task", ["fails", "is killed"])
def test_failures_end_all_processes(mpiexec, task):
    """The error names the worker, and ``mpiexec`` fails."""
    process = mpiexec(task, 2)
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


def test_a_program_without_mpiexec(mpiexec):
    """In a process of its own: MPI listens at the address of the host until its process ends."""
    process = mpiexec("checks", 0)
    assert process.returncode == 1
    message = "MPI has 1 processes; start the program with: mpiexec -n 2"
    assert "ValueError: " in process.stderr
    assert message in process.stderr
