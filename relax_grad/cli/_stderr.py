"""The standard error of a command: TVM's messages are folded into one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import _fold

#: The seconds in which the filter ends after the command, unless a process that it started still
#: holds the pipe.
_SECONDS = 5.0


@contextmanager
def folded() -> Iterator[None]:
    """Pass the standard error of the process, including TVM's C++ code, through
    :mod:`._fold`."""
    if os.name != "posix" or not sys.executable:
        yield
        return
    import subprocess  # help does not need it

    sys.stderr.flush()
    original = os.dup(2)
    # A separate session: Ctrl-C is for the command, whose last lines the filter still passes on.
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _fold.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None  # a pipe
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        os.close(original)
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
