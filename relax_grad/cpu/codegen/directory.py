"""A content-addressed directory of machine code, which only its user may write to."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: The first bytes of an entry. A digest of the rest follows, then a line of description and the
#: data.
_MAGIC = b"relax_grad entry 2\n"

_START = len(_MAGIC) + hashlib.sha256().digest_size

#: The suffixes of entries: object files of functions, and whole programs.
OBJECT, PROGRAM = ".o", ".program"

#: The prefix of files that are being written, and the seconds after which their writer is dead.
_NEW, _DEAD = ".new-", 3600.0

#: The names of folders, of entries, and of files that are being written.
_FOLDER = re.compile("[0-9a-f]{2}")
_ENTRY = re.compile(rf"[0-9a-f]{{62}}({re.escape(OBJECT)}|{re.escape(PROGRAM)})")
_UNFINISHED = re.compile(rf"{re.escape(_NEW)}\w+")

#: The longest description, in bytes.
_DESCRIBED = 1000

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Entry:
    """A file of a directory.

    Attributes
    ----------
    path : Path
        Its path.
    description : str
        The names of the functions.
    size : int
        Its size in bytes.
    used : float
        The time of the last use, in seconds since the epoch.
    """

    path: Path
    description: str
    size: int
    used: float

    @property
    def is_program(self) -> bool:
        """Whether the entry is a whole program."""
        return self.path.suffix == PROGRAM


class Directory:
    """A directory with one file for each entry, named by its key.

    Several processes may use a directory at the same time, because a file gets its name when it is
    complete. A directory that cannot be read or written is no error: nothing is found, and nothing
    is kept.

    Parameters
    ----------
    path : Path
        The path of the directory.
    max_bytes : int, optional
        The largest total size of the entries. The least recently used entries are deleted first.
    """

    def __init__(self, path: Path, max_bytes: int | None = None):
        self.path, self.max_bytes = path, max_bytes
        self._has_grown = False

    def refusal(self) -> str | None:
        """Return the reason for which the machine code of the directory cannot be trusted, or None.

        Another user who may write to the directory, or rename a directory above it, controls the
        code that runs.
        """
        if not hasattr(os, "geteuid"):
            return None
        path = Path(os.path.realpath(self.path))
        for place in (path, *path.parents):
            try:
                status = place.stat()
            except OSError:  # it does not exist yet, or cannot be used either
                continue
            # Others cannot rename or delete the files of a user in a sticky directory such as /tmp.
            is_sticky = place != path and bool(status.st_mode & stat.S_ISVTX)
            reason = _distrusted(status, is_sticky)
            if reason is not None:
                return f"{place} {reason}"
        return None

    def load(self, key: str, suffix: str = OBJECT) -> bytes | None:
        """Return the data of an entry; None if it does not exist, is damaged, or may be written by
        another user."""
        path = self._path(key, suffix)
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(handle, "rb") as file:
                if _distrusted(os.fstat(handle)) is not None:
                    return None
                stored = file.read()
        except OSError:
            return None
        content = stored[_START:]
        if stored[:_START] != _MAGIC + hashlib.sha256(content).digest():
            return None
        with contextlib.suppress(OSError):  # the directory may be read-only
            os.utime(path)
        return content.partition(b"\n")[2]

    def store(self, key: str, data: bytes, suffix: str = OBJECT, description: str = "") -> None:
        """Add an entry, and replace one with the same key.

        If the directory cannot be written to, or the disk is full, do nothing.

        Parameters
        ----------
        key : str
            The key, in hexadecimal digits.
        data : bytes
            The data.
        suffix : str
            The kind of the entry.
        description : str
            A line for :meth:`entries`.
        """
        path = self._path(key, suffix)
        line = description.replace("\n", " ").encode()[:_DESCRIBED]
        content = line + b"\n" + data
        with contextlib.suppress(OSError):
            _make_private(path.parent)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=_NEW)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(content).digest() + content)
                os.replace(name, path)
                self._has_grown = True
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise

    def entries(self) -> Iterator[Entry]:
        """Yield the entries."""
        for path in self._files(_ENTRY):
            with contextlib.suppress(OSError):  # another process has deleted it
                status = path.stat()
                with path.open("rb") as file:
                    start = file.read(_START + _DESCRIBED + 1)
                is_entry = start.startswith(_MAGIC)
                line = start[_START:].partition(b"\n")[0] if is_entry else b"(of another version)"
                text = line.decode(errors="replace")
                yield Entry(path, text, status.st_size, status.st_mtime)

    def trim(self) -> None:
        """Delete the least recently used entries until the total size is within the limit, if this
        process has added entries. Delete what killed processes have left, too."""
        if not self._has_grown:
            return
        self._has_grown = False
        now = time.time()
        for path in self._files(_UNFINISHED):
            with contextlib.suppress(OSError):  # another process has deleted it
                if now - path.stat().st_mtime > _DEAD:
                    path.unlink()
        if self.max_bytes is None:
            return
        files = []
        for path in self._files(_ENTRY):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def clear(self) -> int:
        """Delete all entries, and return the number of freed bytes.

        Raises
        ------
        OSError
            If an entry cannot be deleted.
        """
        freed, folders = 0, set()
        for path in [*self._files(_ENTRY), *self._files(_UNFINISHED)]:
            folders.add(path.parent)
            with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                size = path.stat().st_size
                path.unlink()
                freed += size
        for folder in folders:
            with contextlib.suppress(OSError):  # it has other files, or new ones
                folder.rmdir()
        return freed

    def _files(self, name: re.Pattern[str]) -> Iterator[Path]:
        """Yield the files with a name. The user may have other files in the directory."""
        for path in self.path.glob("??/*"):
            if _FOLDER.fullmatch(path.parent.name) and name.fullmatch(path.name):
                yield path

    def _path(self, key: str, suffix: str) -> Path:
        return self.path / key[:2] / f"{key[2:]}{suffix}"


def _make_private(path: Path) -> None:
    """Make a directory, and those above it, which only this user may write to."""
    if not path.is_dir():
        if path.parent != path:
            _make_private(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def _distrusted(status: os.stat_result, is_sticky: bool = False) -> str | None:
    """Return the reason for which another user than this one and the administrator may write to a
    file or a directory, or None."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to {_name_of_user(status.st_uid)}"
    if is_sticky or not status.st_mode & _OTHERS_WRITE:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "may be written to by every user"
    if _is_of_one_user(status.st_gid):
        return None
    return f"may be written to by the group {_name_of_group(status.st_gid)}"


def _is_of_one_user(group: int) -> bool:
    """Tell whether a group is the private one of this user: many systems make such a group for
    each user, and let it write to all new files."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and set(found.gr_mem) <= {user.pw_name}


def _name_of_user(number: int) -> str:
    import pwd

    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"


def _name_of_group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
