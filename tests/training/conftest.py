"""The programs that train without Python, built once for all tests that run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import relax_grad.runtime

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

_PROJECT = f"""
cmake_minimum_required(VERSION 3.19)
project(programs LANGUAGES C CXX)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}})
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}})
add_subdirectory("{ROOT}/examples/cpp_trainer" cpp_trainer)
add_subdirectory("{ROOT}/examples/c_trainer" c_trainer)
add_executable(errors "{HERE}/trainer_errors.cc")
add_executable(batches "{HERE}/trainer_batches.cc")
add_executable(calls "{HERE}/trainer_c_calls.c")
foreach(program errors batches)
  target_link_libraries(${{program}} PRIVATE relax_grad_trainer)
endforeach()
target_link_libraries(calls PRIVATE relax_grad_trainer_c)
set_target_properties(relax_grad_trainer PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
"""


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """Return the folder of the programs and of the library for C; once for all workers of a test
    run.

    Tests that take it are left out where a tool is not installed.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or fcntl is None:
        return _build(tmp_path_factory.mktemp("programs"))
    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "programs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = shared / f"programs-{run}"
        if not (folder / "built").exists():
            folder.mkdir(exist_ok=True)
            _build(folder)
            (folder / "built").touch()
    return folder / "build"


def _build(folder: Path) -> Path:
    (folder / "CMakeLists.txt").write_text(_PROJECT)
    warnings = "-Wall -Wextra -Werror"
    settings = [
        f"-DPYTHON={sys.executable}",
        f"-DRELAX_GRAD_RUNTIME={relax_grad.runtime.folder()}",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_FLAGS={warnings}",
        f"-DCMAKE_C_FLAGS=-std=c99 -pedantic {warnings}",
    ]
    for command in (
        ["cmake", "-S", folder, "-B", folder / "build", *settings],
        ["cmake", "--build", folder / "build", "--parallel", "2"],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build"
