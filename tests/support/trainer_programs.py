"""The programs of the C++ trainer, and the files that they read and write."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from relax_grad.training import _files


def run(command, code: int = 0) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def train(programs, *arguments, code: int = 0) -> str:
    return run([programs / "train", *arguments], code)


def write_data(path: Path, **arrays) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)


def same_bits(first_file: Path, other: Path) -> dict:
    """Assert that two files have the same tensors and counters; return the rest of the second."""
    (a, first), (b, second) = _files.read(first_file), _files.read(other)
    assert set(a) == set(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), name
    assert first["counters"] == second["counters"]
    return second
