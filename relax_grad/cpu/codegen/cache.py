"""The directory of machine code that is in use."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from types import TracebackType

from ..._validation import check_integer
from .directory import Directory

#: The variable of the environment with the directory; "0" and "off" turn the cache off.
VARIABLE = "RELAX_GRAD_CACHE"

#: The size of the default directory, in bytes.
_DEFAULT_BYTES = 1 << 30


class _Default:
    """The choice of the environment, which counts until the first call of :func:`cache`."""


#: The directory in use, as the only element.
_directories: list[Directory | type[_Default] | None] = [_Default]

#: The reasons for which a directory is not used that the user has been told.
_told: set[str] = set()


class _Using:
    """A context manager that restores the previous directory at the end of a ``with`` block."""

    def __init__(self, before: Directory | type[_Default] | None):
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
    """Keep compiled programs and functions in a directory, for all later compilations of this
    process.

    Without a call, the directory is ``relax_grad`` in the user's directory for caches
    (``$XDG_CACHE_HOME``, or ``~/.cache``), with at most 1 GiB. The environment variable
    ``RELAX_GRAD_CACHE`` names another one, and ``RELAX_GRAD_CACHE=0`` turns the cache off.

    A compiled training step is found as a whole. ``relax_pipeline="relax_grad"`` looks up each
    kernel or group of functions before it compiles them. The key consists of the identity or the
    content of the program or the functions, the target, the options of the pass context, and the
    versions of TVM, LLVM and relax_grad. Several processes can share a directory. Damaged entries
    are compiled again.

    Anyone with write access to the directory controls the machine code that runs. Therefore a
    directory that another user may write to is refused.

    Parameters
    ----------
    directory : str or os.PathLike or None
        The directory, which is created if it does not exist. None means no directory.
    max_bytes : int, optional
        The largest size of the directory in bytes after a compilation. The least recently used
        entries are deleted. By default the size is not limited. A ResNet-18's training step takes 2
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
    PermissionError
        If another user may write to the directory, or replace it.

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
        reason = new.refusal()
        if reason is not None:
            raise PermissionError(
                f"directory must be one that no other user may write to, because the machine code "
                f"in it runs, but {reason}; pass another directory, or take the permission away: "
                f"chmod go-w"
            )
    using = _Using(_directories[0])
    _directories[0] = new
    return using


def current() -> Directory | None:
    """Return the directory in use; None if there is none, or if another user may write to it."""
    directory = _directories[0]
    if isinstance(directory, type):
        directory, problem = of_environment()
        if problem is not None:
            _tell(problem)
    if directory is None:
        return None
    reason = directory.refusal()
    if reason is None:
        return directory
    _tell(
        f"relax_grad does not keep compiled programs: another user could replace the machine code "
        f"in {directory.path}, because {reason}; set {VARIABLE} to a directory of your own, or to "
        f"0 for no cache"
    )
    return None


def of_environment() -> tuple[Directory | None, str | None]:
    """Return the directory that the environment chooses, or None, and the fault of its choice, or
    None."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() in ("0", "off"):
        return None, None
    try:
        path = Path(chosen).expanduser().absolute() if chosen else _default_path()
        is_file = path.is_file()
    except (RuntimeError, OSError):  # there is no home, or it may not be read
        return None, None
    if is_file:
        return None, (
            f"{VARIABLE} must name a directory, or be 0 for no cache, but {path} is a file: "
            f"relax_grad does not keep compiled programs"
        )
    return Directory(path, _DEFAULT_BYTES), None


def _default_path() -> Path:
    """Return the directory of relax_grad in the user's directory for caches.

    The XDG Base Directory Specification has this rule; it ignores relative paths.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "relax_grad")
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"], "relax_grad", "cache")
    return Path.home() / ".cache" / "relax_grad"


def _tell(message: str) -> None:
    """Warn of a directory that is not used, once."""
    if message not in _told:
        _told.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
