"""Permission for the processor's tiles of bfloat16 (AMX).

Linux lets a process use the tiles once it has asked. Compiled programs ask by themselves, so that
exported ones need nothing from Python; they compute the same sums with vectors where they may not.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from pathlib import Path

#: The system call ``arch_prctl`` of x86-64, its request for permission, and the tiles' state.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18

#: The features of LLVM, and Linux's names of them.
FEATURES = {"amx-tile": "amx_tile", "amx-bf16": "amx_bf16"}


class Permission(enum.Enum):
    """Whether this process may use tiles."""

    #: The processor, or what a virtual machine shows of it, has no tiles.
    ABSENT = "absent"
    GRANTED = "granted"
    REFUSED = "refused"


@functools.cache
def flags() -> frozenset[str]:
    """Return the instruction sets of this machine by Linux's names; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    first = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(first.partition(":")[2].split())


@functools.cache
def permission() -> Permission:
    """Ask Linux for the tiles, and return the answer."""
    if not set(FEATURES.values()) <= flags():
        return Permission.ABSENT
    call = ctypes.CDLL(None, use_errno=True).syscall
    answer = call(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST), ctypes.c_long(_TILE_DATA))
    return Permission.GRANTED if answer == 0 else Permission.REFUSED
