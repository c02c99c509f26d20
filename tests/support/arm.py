"""Programs for AArch64 on this machine: the tools that build and emulate them, and calls of
compiled functions.

The runtime of TVM for AArch64 consists of the packages that pip has for that architecture.
``make arm`` puts them into the folder that the tests look at, ``build/aarch64``; the environment
variable ``RELAX_GRAD_AARCH64`` names another one.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

import relax_grad.runtime

ROOT = Path(__file__).parents[2]
COMPILER = "aarch64-linux-gnu-g++"

#: The emulator, by the names that Debian's packages qemu-user and qemu-user-static give it.
EMULATOR = "qemu-aarch64"
if shutil.which(EMULATOR) is None and shutil.which(f"{EMULATOR}-static"):
    EMULATOR += "-static"

#: The folder of the C library for AArch64, on Debian.
_SYSROOT = os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu")

_PROJECT = """
cmake_minimum_required(VERSION 3.19)
project(programs LANGUAGES CXX)
add_subdirectory("{root}/examples/cpp_trainer" example)
add_executable(arm_calls "{root}/tests/support/arm_calls.cc")
target_link_libraries(arm_calls PRIVATE relax_grad_trainer)
"""


def packages() -> Path:
    """Return the folder of TVM's packages for AArch64."""
    return Path(os.environ.get("RELAX_GRAD_AARCH64") or ROOT / "build" / "aarch64").absolute()


@functools.cache
def missing() -> str | None:
    """Return the reason why programs for AArch64 cannot be built or run here; None if they can."""
    for tool, package in (
        ("cmake", "cmake"),
        (COMPILER, "g++-aarch64-linux-gnu"),
        (EMULATOR, "qemu-user or qemu-user-static"),
    ):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian's package {package})"
    for name in ("apache_tvm", "apache_tvm_ffi"):
        version = metadata.version(name)
        if not (packages() / f"{name}-{version}.dist-info").is_dir():
            return f"{packages()} has no {name} {version} for AArch64 (make arm)"
    return None


def build(folder: Path) -> Path:
    """Build the example's ``train`` and the program ``arm_calls`` of this folder; return the folder
    of both."""
    (folder / "CMakeLists.txt").write_text(_PROJECT.format(root=ROOT))
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        "CMAKE_CXX_FLAGS": "-Wall -Wextra -Werror",
        # The programs are short runs: their compilation takes longer.
        "CMAKE_BUILD_TYPE": "Debug",
        "PACKAGES": packages(),
        "EXTRA": "ON",
        "RELAX_GRAD_RUNTIME": relax_grad.runtime.folder(),
    }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    target = folder / "build"
    _run(["cmake", "-S", folder, "-B", target, *options])
    _run(["cmake", "--build", target, "--parallel", "2"])
    (target / "train").symlink_to(target / "example" / "train")
    return target


def emulate(program: Path, *arguments, cpu: str = "max", threads: int = 2) -> str:
    """Run a program for AArch64; return its output."""
    command = [EMULATOR, "-cpu", cpu, "-L", _SYSROOT, program, *arguments]
    return _run(command, {"TVM_NUM_THREADS": str(threads)})


def call(
    programs: Path,
    library: Path,
    arguments: Mapping[str, Sequence[np.ndarray]],
    results: Mapping[str, Sequence[np.ndarray]],
    cpu: str = "max",
) -> dict[str, list[np.ndarray]]:
    """Call functions of a library for AArch64.

    Parameters
    ----------
    programs : Path
        The folder that :func:`build` returned.
    library : Path
        Tensor functions, or a program of Relax.
    arguments : Mapping[str, Sequence[np.ndarray]]
        The arguments of each function.
    results : Mapping[str, Sequence[np.ndarray]]
        The tensors that each function writes to; Relax functions return theirs.
    cpu : str
        The processor that the emulator is.

    Returns
    -------
    found : dict[str, list[np.ndarray]]
        The results of each function, in order; nested tuples are flat.
    """
    from safetensors import safe_open
    from safetensors.numpy import save_file

    tensors = {
        f"{name}/{kind}/{i}": np.ascontiguousarray(array).reshape(np.shape(array))
        for kind, groups in (("in", arguments), ("out", results))
        for name, group in groups.items()
        for i, array in enumerate(group)
    }
    inputs, written = library.with_suffix(".given"), library.with_suffix(".written")
    save_file(tensors, inputs)
    emulate(programs / "arm_calls", library, inputs, written, cpu=cpu)
    written_arrays: dict[str, dict[int, np.ndarray]] = {name: {} for name in arguments}
    with safe_open(written, framework="numpy") as file:
        for key in file.keys():  # noqa: SIM118, no mapping
            name, _, number = key.rsplit("/", 2)
            written_arrays[name][int(number)] = file.get_tensor(key)
    return {
        name: [arrays[i] for i in range(len(arrays))] for name, arrays in written_arrays.items()
    }


def difference(actual: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference relative to max(1, the largest finite number); infinite for
    another dtype, shape or NaN.

    Integers and booleans differ by infinity, if at all.
    """
    if (actual.dtype, actual.shape) != (wanted.dtype, wanted.shape):
        return np.inf
    if wanted.dtype.kind in "iub":
        return 0.0 if np.array_equal(actual, wanted) else np.inf
    actual, wanted = actual.astype("float64"), wanted.astype("float64")
    finite = np.isfinite(wanted)
    if not np.array_equal(actual[~finite], wanted[~finite], equal_nan=True):
        return np.inf
    scale = max(1.0, np.abs(wanted[finite]).max(initial=0.0))
    error = np.abs(actual[finite] - wanted[finite]).max(initial=0.0) / scale
    return float(np.nan_to_num(error, nan=np.inf))


def _run(command: Sequence, environment: Mapping[str, str] | None = None) -> str:
    result = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout
