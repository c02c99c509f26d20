"""A digest of the package's own sources, which determine the functions of kernels with given
arguments."""

from __future__ import annotations

import hashlib
import time
from functools import lru_cache
from pathlib import Path

#: The time at which the package was imported. Files that are older are the sources of the running
#: modules.
_IMPORTED = time.time()

_PACKAGE = Path(__file__).parents[2]


@lru_cache(maxsize=1)
def sources() -> str | None:
    """Return a digest of all sources of the package; None if they may differ from the running
    modules."""
    return digest(_PACKAGE, _IMPORTED)


def digest(package: Path, imported: float) -> str | None:
    """Return a digest of the names and contents of Python files.

    Parameters
    ----------
    package : Path
        The directory of the files.
    imported : float
        The time of the import in seconds since the epoch. A file that was written later may differ
        from the running module.

    Returns
    -------
    digest : str or None
        None if there is no file, if one cannot be read, or if one was written later.
    """
    result, number = hashlib.sha256(), 0
    try:
        for path in sorted(package.rglob("*.py")):
            status = path.stat()
            # Check the time of the last status change too: a copy may get an earlier modification
            # time.
            if max(status.st_mtime, status.st_ctime) > imported:
                return None
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            result.update(f"{path.relative_to(package).as_posix()} {content}\n".encode())
            number += 1
    except OSError:
        return None
    return result.hexdigest() if number else None
