"""A directory of compiled functions, by content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from types import TracebackType

#: What entries begin with; the digest of what follows comes next.
_MAGIC = b"relax_grad object 1\n"

#: The directories that are in use; the last one counts.
_directories: list[Directory | None] = [None]


class Directory:
    """Entries as files, whose names are their keys.

    Several processes may use a directory at the same time: a file appears under its name when it is complete.

    Parameters
    ----------
    path : Path
        Where the entries are.
    max_bytes : int, optional
        The size that the entries may have together; those that have not been used for longest are deleted first.
    """

    def __init__(self, path: Path, max_bytes: int | None = None):
        self.path, self.max_bytes = path, max_bytes

    def load(self, key: str) -> bytes | None:
        """Return an entry; None if there is none, or its file is damaged."""
        path = self._path(key)
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        data = stored[start:]
        if stored[:start] != _MAGIC + hashlib.sha256(data).digest():
            return None
        with contextlib.suppress(OSError):  # of a directory that may be read only
            os.utime(path)
        return data

    def store(self, key: str, data: bytes) -> None:
        """Add an entry, in the place of one of the same key; a directory that cannot be written to is left alone."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(data).digest() + data)
                os.replace(name, path)
            except OSError:
                os.unlink(name)

    def trim(self) -> None:
        """Delete the entries that have not been used for longest, until the others are small enough."""
        if self.max_bytes is None:
            return
        found = []
        for path in self.path.glob("*/*.o"):
            with contextlib.suppress(OSError):  # another process has deleted it
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _path(self, key: str) -> Path:
        return self.path / key[:2] / f"{key[2:]}.o"


class _Using:
    """Ends the use of a directory when a ``with`` block ends."""

    def __init__(self, before: Directory | None):
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _directories[0] = self._before


def cache(
    directory: str | os.PathLike | None, max_bytes: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Keep compiled functions in a directory, for all that this process compiles from now on.

    What ``relax_pipeline="relax_grad"`` compiles is looked up there first, one kernel or group of functions at a
    time. The key is what the functions are made of, or their content, the target, the options of the pass context, and the
    versions of TVM, LLVM and relax_grad. Several processes can share a directory. Files that are damaged are compiled again.

    Whoever can write to the directory decides which machine code is run: it should belong to the user.

    Parameters
    ----------
    directory : str or os.PathLike or None
        The directory, which is made if it does not exist. None: none, which is the default.
    max_bytes : int, optional
        The size in bytes that the directory may have after a compilation; entries that have not been used for
        longest are deleted. By default it is not limited. A ResNet-18's training step takes 3 MB.

    Returns
    -------
    context : contextlib.AbstractContextManager
        Used in a ``with`` statement, it returns to the directory of before.

    Raises
    ------
    TypeError
        If the directory is no path, or ``max_bytes`` no integer.
    ValueError
        If ``max_bytes`` is negative, or the directory the name of a file.

    Examples
    --------
    >>> import tempfile, relax_grad
    >>> with tempfile.TemporaryDirectory() as directory, relax_grad.cache(directory):
    ...     pass  # tvm.compile(..., relax_pipeline="relax_grad")
    """
    if directory is not None and not isinstance(directory, (str, bytes, os.PathLike)):
        raise TypeError(
            f"directory must be a path, or None for no directory, but it is {directory!r}"
        )
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
        raise TypeError(f"max_bytes must be an integer or None, but it is {max_bytes!r}")
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes must not be negative, but it is {max_bytes}")
    new = None
    if directory is not None:
        path = Path(os.fsdecode(os.fspath(directory))).absolute()
        if path.is_file():
            raise ValueError(f"directory must be the path of a directory, but {path} is a file")
        new = Directory(path, max_bytes)
    using = _Using(_directories[0])
    _directories[0] = new
    return using


def current() -> Directory | None:
    """Return the directory in use."""
    return _directories[0]
