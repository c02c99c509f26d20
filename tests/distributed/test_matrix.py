"""Every way of training by several workers, by every transport, with 2 and 3 workers."""

from __future__ import annotations

import json

import pytest
import worker_matrix
from parallel_models import GPT_SHARDS, char_gpt
from sessions import new_session

from relax_grad.distributed import tensor_parallel

pytestmark = pytest.mark.slow

TRANSPORTS = ["shared memory", "gloo", "MPI"]


@pytest.fixture
def execute(request):
    """Return a function that runs ``measured`` or ``resumed`` of ``worker_matrix`` by some
    workers."""
    for package in ("torch", "safetensors"):
        pytest.importorskip(package, reason=f"the package {package} is not installed: extra train")

    def execute(transport, count, function, folder):
        if transport == "MPI":
            process = request.getfixturevalue("mpiexec")(function, count, str(folder))
            assert process.returncode == 0, process.stdout + process.stderr
            (line,) = (text for text in process.stdout.splitlines() if text.startswith("{"))
            return json.loads(line)
        with new_session(count, shared_memory=transport == "shared memory") as workers:
            return getattr(worker_matrix, function)(workers, folder)

    return execute


def test_heads_that_the_workers_do_not_divide():
    step, _ = char_gpt(width=12, heads=3)
    with (
        new_session(2) as workers,
        pytest.raises(ValueError, match="heads must be a multiple of the workers"),
    ):
        tensor_parallel(step, workers, shards=GPT_SHARDS)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_are_as_one(execute, transport, count, tmp_path):
    """To the bit in a second run and after a file, and within rounding errors of one worker."""
    results = execute(transport, count, "measured", tmp_path)
    assert list(results) == list(worker_matrix.WAYS)
    for way, result in results.items():
        tolerance = worker_matrix.WAYS[way][2]
        assert result["same again"], way
        assert result["same resumed"], way
        assert result["error"] < tolerance, way
        assert result["error resumed by one"] < tolerance, way


@pytest.mark.parametrize(
    ("first", "count", "second", "other"),
    [
        ("shared memory", 2, "gloo", 3),
        ("gloo", 3, "shared memory", 2),
        ("shared memory", 3, "MPI", 2),
        ("MPI", 2, "shared memory", 3),
    ],
)
def test_training_goes_on_with_another_number(execute, first, count, second, other, tmp_path):
    execute(first, count, "measured", tmp_path)
    results = execute(second, other, "resumed", tmp_path)
    assert list(results) == worker_matrix.COMMON
    for way, result in results.items():
        assert result["error"] < worker_matrix.WAYS[way][2], way
