"""Optional packages: their supported versions, and errors for missing, broken and old ones.

setup.py runs this file for the requirements of the extras, so that it imports only the standard
library.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from types import ModuleType

#: The requirement of each optional package, by the name of its module. PyTorch's upper bound is two
#: minor releases above the newest one that was tested: its private names move. The others have
#: none, since a bound would take a newer release away from the user's other packages.
REQUIREMENTS = {
    "torch": "torch>=2.11,<2.18",
    "onnx": "onnx>=1.17",
    "onnxsim": "onnxsim>=0.8",
    "safetensors": "safetensors>=0.5",
    "matplotlib": "matplotlib>=3.8",
    "mpi4py": "mpi4py>=4",
    "rich": "rich>=13",
    "shtab": "shtab>=1.7",
}

#: The newest release of PyTorch that passes the tests.
TESTED_TORCH = (2, 15)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numeric release of a version string: ``"0.27.0.post1"`` is ``(0, 27, 0)``.

    Raises
    ------
    ValueError
        If the string does not begin with a release.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if match is None:
        raise ValueError(f"not a version: {text!r}")
    return tuple(int(part) for part in match[1].split("."))


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None when its metadata is missing."""
    from importlib import metadata  # late: it takes longer than the rest of this module

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_installed(module: str) -> bool:
    """Tell whether a module is found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module in sys.modules without a specification
        return False


def is_usable(module: str) -> bool:
    """Tell whether an optional package is installed, can be imported and is new enough."""
    return _loaded(module)[1] is None


def fault(module: str) -> tuple[str, str] | None:
    """Return the reason why an optional package cannot be used and the remedy, or None."""
    return _loaded(module)[1]


def load(module: str, user: str) -> ModuleType:
    """Import an optional package.

    Parameters
    ----------
    module : str
        A key of :data:`REQUIREMENTS`.
    user : str
        What needs the package: the subject of the error.

    Raises
    ------
    ImportError
        If the package is missing, cannot be imported or is too old. The message has the supported
        and the installed version, and the command that installs a supported one.
    """
    imported, problem = _loaded(module)
    if problem is None:
        assert imported is not None
        return imported
    reason, remedy = problem
    raise ImportError(f"{user} needs {REQUIREMENTS[module]}: {reason}; {remedy}", name=module)


def newer_torch(version: str) -> str | None:
    """Return a remark on a release of PyTorch above :data:`TESTED_TORCH`; None for others."""
    try:
        release = parse_version(version)[:2]
    except ValueError:
        return None
    tested = ".".join(map(str, TESTED_TORCH))
    return f"newer than {tested}, the newest tested release" if release > TESTED_TORCH else None


def warn_of_newer_torch(version: str, stacklevel: int) -> None:
    """Warn of a release of PyTorch above :data:`TESTED_TORCH`."""
    remark = newer_torch(version)
    if remark:
        before = f"{TESTED_TORCH[0]}.{TESTED_TORCH[1] + 1}"
        warnings.warn(
            f"PyTorch {version} is {remark}; if a model is not imported that should be: pip "
            f"install 'torch<{before}'",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def _first_fault(module: str, named: str) -> tuple[str, str]:
    """Return the reason and the remedy of an import that fails in another way the second time."""
    import subprocess  # late: only broken packages need it
    import sys

    command = [sys.executable, "-c", f"import {module}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()
    reason = printed.splitlines()[-1] if printed else "it failed once in this process"
    remedy = f"install it again: pip install --force-reinstall '{REQUIREMENTS[module]}'"
    return f"{named}, but its import fails ({reason})", remedy


def _loaded(module: str) -> tuple[ModuleType | None, tuple[str, str] | None]:
    """Return an optional package, or the reason why it cannot be used with the remedy."""
    requirement = REQUIREMENTS[module]
    if not is_installed(module):
        return None, (f"{module} is not installed", f"install it: pip install '{requirement}'")
    version = installed_version(module)
    named = f"{module} {version or 'of an unknown version'} is installed"
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a broken package raises any class
        message = next(iter(str(error).strip().splitlines()), "")
        if "once per process" in message:  # TVM tried the import before, and hid its error
            return None, _first_fault(module, named)
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and missing.partition(".")[0] != module:
            remedy = f"install what it needs: pip install '{requirement}'"
        else:
            remedy = f"install it again: pip install --force-reinstall '{requirement}'"
        return None, (
            f"{named}, but its import fails ({type(error).__name__}: {message})",
            remedy,
        )
    if getattr(imported, "__file__", None) is None:
        places = ", ".join(getattr(imported, "__path__", ["an unknown place"]))
        return None, (
            f"only a folder without the package is left of {module} in {places}",
            f"remove the folder, and install it: pip install '{requirement}'",
        )
    lowest = re.search(r">=([\d.]+)", requirement)
    try:
        found = parse_version(version or str(imported.__version__))
    except (AttributeError, ValueError):  # a build without a version
        return imported, None
    if lowest is not None and found < parse_version(lowest[1]):
        return None, (
            f"{named}",
            f"install a supported one: pip install --upgrade '{requirement}'",
        )
    return imported, None
