"""What the commands have in common of their texts."""

from __future__ import annotations

import tvm

from .. import __version__, _compat


def versions() -> str:
    """Return the versions of relax_grad and of what it runs on, in one line."""
    ffi = _compat.installed_version("apache-tvm-ffi") or "of unknown version"
    return f"relax_grad {__version__}, apache-tvm {tvm.__version__}, apache-tvm-ffi {ffi}"


def count_of(number: int, noun: str) -> str:
    """Return a number and its noun in the singular or the plural: ``"2 samples"``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def last_line(error: Exception) -> str:
    """Return the end of an error's message: TVM's own carry a C++ traceback in front of it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "(no message)"
