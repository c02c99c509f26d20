"""A filter of standard error that counts TVM's messages, passes other lines on, and ends with the
count.

It runs as a script in a separate process, so that the last lines of a command that crashes are
not lost.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable

#: A message of TVM's C++ code: the time, the source file and the line precede it.
_MESSAGE = re.compile(rb"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


def fold(lines: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Write the lines that are not messages of TVM, and at the end the number of messages, if any.

    Parameters
    ----------
    lines : Iterable[bytes]
        The lines, with their ends.
    write : Callable[[bytes], object]
        Writes bytes at once.
    """
    number = 0
    for line in lines:
        if _MESSAGE.match(line):
            number += 1
        else:
            write(line)
    if number:
        noun = "messages" if number > 1 else "message"
        write(f"{number} {noun} of TVM not shown; --verbose shows them\n".encode())


if __name__ == "__main__":
    fold(sys.stdin.buffer, io.FileIO(2, "w", closefd=False).write)
