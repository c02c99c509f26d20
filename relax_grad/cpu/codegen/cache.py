"""A content-addressed directory of compiled functions."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from types import TracebackType

from ..._validation import check_integer

#: The first bytes of an entry. The digest of the data comes next, then the data.
_MAGIC = b"relax_grad object 1\n"

#: The directory in use, as the only element.
_directories: list[Directory | None] = [None]


class Directory:
    """A directory with one file for each entry, named by its key.

    Several processes may use a directory at the same time, because a file gets its name when it is
    complete.

    Parameters
    ----------
    path : Path
        The path of the directory.
    max_bytes : int, optional
        The largest total size of the entries. The least recently used entries are deleted first.
    """

    def __init__(self, path: Path, max_bytes: int | None = None):
        self.path, self.max_bytes = path, max_bytes

    def load(self, key: str) -> bytes | None:
        """Return an entry; None if it does not exist or its file is damaged."""
        path = self._path(key)
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        data = stored[start:]
        if stored[:start] != _MAGIC + hashlib.sha256(data).digest():
            return None
        with contextlib.suppress(OSError):  # the directory may be read-only
            os.utime(path)
        return data

    def store(self, key: str, data: bytes) -> None:
        """Add an entry, and replace one with the same key. If the directory is not writable, do
        nothing."""
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
        """Delete the least recently used entries until the total size is within the limit."""
        if self.max_bytes is None:
            return
        files = []
        for path in self.path.glob("*/*.o"):
            with contextlib.suppress(OSError):  # another process has deleted it
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _path(self, key: str) -> Path:
        return self.path / key[:2] / f"{key[2:]}.o"


class _Using:
    """A context manager that restores the previous directory at the end of a ``with`` block."""

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
    """Keep compiled functions in a directory, for all later compilations of this process.

    ``relax_pipeline="relax_grad"`` looks up each kernel or group of functions there before it
    compiles them. The key consists of the identity or the content of the functions, the target, the
    options of the pass context, and the versions of TVM, LLVM and relax_grad. Several processes can
    share a directory. Damaged entries are compiled again.

    Anyone with write access to the directory controls the machine code that runs, so it should
    belong to the user.

    Parameters
    ----------
    directory : str or os.PathLike or None
        The directory, which is created if it does not exist. None means no directory, which is the
        state at the start.
    max_bytes : int, optional
        The largest size of the directory in bytes after a compilation. The least recently used
        entries are deleted. By default the size is not limited. A ResNet-18's training step takes 3
        MB.

    Returns
    -------
    context : contextlib.AbstractContextManager
        In a ``with`` statement, it restores the previous directory at the end.

    Raises
    ------
    TypeError
        If ``directory`` is not a path, or ``max_bytes`` is not an integer.
    ValueError
        If ``max_bytes`` is negative, or ``directory`` is a file.

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
    if max_bytes is not None:
        max_bytes = check_integer("max_bytes", max_bytes, 0, of="bytes", also="None")
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
