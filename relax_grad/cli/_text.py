"""Text helpers that the commands share."""

from __future__ import annotations

import importlib
import sys

from .. import __version__

#: The differentiation passes, by the names of :data:`relax_grad.testing._program.PASSES`.
PASSES = ("relax_grad", "tvm")


def versions() -> str:
    """Return the versions of relax_grad, TVM and tvm-ffi in one line, without importing an installed TVM."""
    ffi = _installed("apache-tvm-ffi") or "of unknown version"
    return f"relax_grad {__version__}, apache-tvm {_tvm_version()}, apache-tvm-ffi {ffi}"


def _tvm_version() -> str:
    installed = None if "tvm" in sys.modules else _installed("apache-tvm")
    # A TVM built from source may have no metadata.
    return installed or importlib.import_module("tvm").__version__


def _installed(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def count_of(number: int, noun: str) -> str:
    """Return a number and its noun in the singular or the plural: ``"2 samples"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def last_line(error: Exception) -> str:
    """Return the last line of an error's message; in TVM's errors a C++ traceback precedes it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "(no message)"
