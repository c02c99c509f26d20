"""Files and folders that appear whole or not at all, whenever the process is killed.

They are written beside their place under the name ``.NAME.XXXXXXXX.part``, under a lock that the
system gives up with the process. The next writer removes those without a lock. A name that is too
long for that is cut, and its CRC-32 follows. runtime/write.cc does the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # only POSIX has it
    fcntl = None  # type: ignore[assignment]  # a module's name cannot be declared optional

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

#: The bytes of a name on most file systems, and those that ``.``, ``.XXXXXXXX.part`` and
#: ``~XXXXXXXX`` take.
_MOST, _OTHERS, _CHECKSUM = 255, 15, 9


def write_file(path: str | os.PathLike, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file; it is replaced when the disk has all of the new one.

    A symbolic link stays, and the file that it names is replaced.

    Raises
    ------
    OSError
        If the file cannot be written, or is a pipe, a device or a folder.
    """
    given, path = path, Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            example = os.path.join(given, "state.safetensors")
            raise IsADirectoryError(f"{given} is a folder; give a file, such as {example!r}")
        if not stat.S_ISREG(mode):
            raise FileExistsError(errno.EEXIST, "it is no regular file", os.fspath(given))
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"there is no folder {os.fspath(path.parent)!r} for {path.name}; make it: "
            f"os.makedirs({os.fspath(path.parent)!r})"
        )
    _remove_left_over(path.parent, path.name)
    part, handle = _locked(path.parent, path.name, _create)
    with os.fdopen(handle, "wb") as file:
        try:
            for data in parts:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            # The lock is held until no other process could take the file for one that was left
            # over.
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()
            raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: str | os.PathLike, last: str) -> Iterator[Path]:
    """Give an empty folder to write files to, and then replace another folder by it, whose other
    files are kept.

    Where the system cannot exchange two folders, or the old one must stay, as mount points and the
    working folder must, its files are replaced one by one. Meanwhile the file ``last`` is absent.

    Parameters
    ----------
    path : str or os.PathLike
        The folder, which may exist. A symbolic link stays, and the folder that it names is
        replaced.
    last : str
        The name of a file without which a folder is none of its kind.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_dir():
        raise FileExistsError(errno.EEXIST, "there is a file, and no folder", str(path))
    is_fixed = path.is_dir() and _is_fixed(path)
    parent = path if is_fixed else path.parent
    _remove_left_over(parent, path.name)
    part, handle = _locked(parent, path.name, _create_folder)
    try:
        yield part
        names = sorted(file.name for file in part.iterdir())
        for name in names:
            _sync(part / name)
        if is_fixed or not _replaced(part, path, names):
            _replace_files(part, path, names, last)
        _sync_folder(path)
        _sync_folder(path.parent)
    finally:
        os.close(handle)
        # It holds the new files after an error, and otherwise the old ones, if anything.
        shutil.rmtree(part, ignore_errors=True)


def _is_fixed(path: Path) -> bool:
    working = Path(os.path.realpath(os.curdir))
    is_working = path == working or path in working.parents
    return is_working or os.path.ismount(path) or not os.access(path.parent, os.W_OK)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _create(path: Path) -> int:
    # The system subtracts the umask.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _create_folder(path: Path) -> int:
    path.mkdir()
    return os.open(path, os.O_RDONLY)


def _locked(folder: Path, name: str, create: Callable[[Path], int]) -> tuple[Path, int]:
    """Return a new file or folder, and its descriptor, which has a lock."""
    while True:
        part = folder / f".{_stem(folder, name)}.{secrets.token_hex(4)}.part"
        try:
            handle = create(part)
        except FileExistsError:
            continue
        except FileNotFoundError:
            if folder.is_dir():  # another writer removed the new folder before it was locked
                continue
            raise
        try:
            _lock(handle)
            if os.path.samestat(os.fstat(handle), os.lstat(part)):
                return part, handle
        except FileNotFoundError:  # another writer removed it before it was locked
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _stem(folder: Path, name: str) -> str:
    """Return the name of a file in the names of files that take its place."""
    encoded, most = os.fsencode(name), _MOST
    with contextlib.suppress(AttributeError, OSError, ValueError):
        most = os.pathconf(folder, "PC_NAME_MAX")
    if len(encoded) + _OTHERS <= most or most < _OTHERS + _CHECKSUM:
        return name
    length = most - _OTHERS - _CHECKSUM
    while length and encoded[length] & 0xC0 == 0x80:  # characters of several bytes are whole
        length -= 1
    return f"{os.fsdecode(encoded[:length])}~{zlib.crc32(encoded):08x}"


def _lock(handle: int, *, waits: bool = True) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            # Without locks, as on some file systems of networks, nothing is removed.
            if not waits:
                raise


def _remove_left_over(folder: Path, name: str) -> None:
    """Remove what killed processes left of a file or folder."""
    pattern = re.compile(rf"\.{re.escape(_stem(folder, name))}\.[0-9a-z_]{{8}}\.part")
    try:
        parts = [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    except OSError:
        return
    for part in parts:
        is_folder = part.is_dir() and not part.is_symlink()
        try:
            handle = os.open(part, os.O_RDONLY if is_folder else os.O_RDWR)
        except OSError:
            continue
        try:
            _lock(handle, waits=False)
            if fcntl is not None:
                shutil.rmtree(part) if is_folder else part.unlink()
        except OSError:
            pass
        finally:
            os.close(handle)


def _replaced(part: Path, path: Path, names: Sequence[str]) -> bool:
    """Exchange the names of two folders; return False if the system cannot."""
    if path.is_dir():
        shutil.copymode(path, part)
    try:
        os.rename(part, path)  # if there is none, or an empty one
        return True
    except OSError:
        if not path.is_dir():
            raise

    def replaced(folder: str, members: Sequence[str]) -> Iterable[str]:
        return set(names).intersection(members) if Path(folder) == path else ()

    shutil.copytree(
        path, part, symlinks=True, ignore=replaced, copy_function=_link, dirs_exist_ok=True
    )
    _sync_folder(part)
    try:
        _exchange(part, path)
        return True
    except OSError:
        return False


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _exchange(first: Path, second: Path) -> None:
    """Exchange the names of two folders, at once."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError) as error:
        raise OSError(errno.ENOSYS, "the system has no renameat2") from error
    names = [os.fsencode(path) for path in (first, second)]
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))


def _replace_files(part: Path, path: Path, names: Sequence[str], last: str) -> None:
    path.joinpath(last).unlink(missing_ok=True)
    _sync_folder(path)
    for name in sorted(names, key=lambda name: name == last):
        os.replace(part / name, path / name)
