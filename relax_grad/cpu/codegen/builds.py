"""The identity of the running build of TVM, which determines the machine code of a function."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import tvm

#: The distribution of TVM, and the beginning of the paths of its files.
_DISTRIBUTION, _FOLDER = "apache-tvm", "tvm/"

_SUFFIXES = (".py", ".so", ".dylib", ".dll")


@lru_cache(maxsize=1)
def build() -> str:
    """Return a text that differs between builds of TVM, also between builds of one version.

    A wheel has a list of the digests of its files. For a build from source, the sizes and the times
    of the files count.
    """
    try:
        record = metadata.distribution(_DISTRIBUTION).read_text("RECORD") or ""
    except metadata.PackageNotFoundError:
        record = ""
    # The lines of compiled Python files have no digests, and come and go.
    files = sorted(
        line for line in record.splitlines() if line.startswith(_FOLDER) and ",sha256=" in line
    )
    if files:
        return hashlib.sha256("\n".join(files).encode()).hexdigest()
    return stamps(Path(tvm.__file__).parent)


def stamps(*folders: Path) -> str:
    """Return a digest of the names, sizes and times of the sources and libraries in folders."""
    result = hashlib.sha256()
    for folder in (*folders, *_libraries()):
        for path, below, names in os.walk(folder):
            below.sort()
            for name in sorted(names):
                if name.endswith(_SUFFIXES):
                    status = os.stat(os.path.join(path, name))
                    result.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return result.hexdigest()


def _libraries() -> list[Path]:
    """Return the folders of the loaded libraries of TVM."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # another system: a build from source has its libraries in the package
        return []
    paths = {line.split()[-1] for line in maps.splitlines() if "libtvm" in line}
    return sorted({Path(path).parent for path in paths})
