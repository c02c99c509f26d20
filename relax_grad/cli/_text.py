"""Text helpers that the commands share."""

from __future__ import annotations

import importlib
import json
import math
import sys

from .. import __version__

#: The differentiation passes, by the names of :data:`relax_grad.testing._program.PASSES`.
PASSES = ("relax_grad", "tvm")


#: The last lines of the help of each command.
EXIT_CODES = """\
exit codes:
  0  {success}
  1  {problem}
  2  the command line is wrong
  130  interrupted
"""


def versions() -> str:
    """Return the versions of relax_grad, TVM and tvm-ffi in one line, without importing an
    installed TVM."""
    return ", ".join(
        f"{name} {version or 'of unknown version'}" for name, version in version_table().items()
    )


def version_table() -> dict[str, str | None]:
    """Return the versions of relax_grad, TVM and tvm-ffi, without importing an installed TVM."""
    return {
        "relax_grad": __version__,
        "apache-tvm": _tvm_version(),
        "apache-tvm-ffi": _installed("apache-tvm-ffi"),
    }


def print_json(value: object) -> None:
    """Print a value to standard output as JSON, which has no NaN and no infinity: they become
    null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
