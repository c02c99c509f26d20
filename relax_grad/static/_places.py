"""Offsets for buffers with known lifetimes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import aligned

#: The first moment of a buffer without uses.
_NEVER = sys.maxsize


@dataclass(eq=False)
class Slot:
    """A buffer of the arena.

    Attributes
    ----------
    bytes : int
        Its size.
    first, last : int
        The first and the last moment of its use. Moment 0 is before the first call.
    offset : int
        Its place, which :func:`place` sets.
    """

    bytes: int
    first: int = _NEVER
    last: int = -1
    offset: int = 0

    def use(self, moment: int) -> None:
        """Extend the lifetime to a moment."""
        self.first = min(self.first, moment)
        self.last = max(self.last, moment)

    def overlaps(self, other: Slot) -> bool:
        """Tell whether two buffers that are used are in use at one moment."""
        return self.first <= other.last and other.first <= self.last


def place(slots: Sequence[Slot]) -> int:
    """Give each buffer an offset, and return the bytes of all.

    Large buffers come first, each at the lowest offset that is free during its lifetime. A buffer
    without uses takes no bytes.
    """
    placed: list[Slot] = []
    used = [slot for slot in slots if slot.first < _NEVER]
    for slot in sorted(used, key=lambda slot: -slot.bytes):
        slot.offset = 0
        for other in sorted(placed, key=lambda other: other.offset):
            if not slot.overlaps(other):
                continue
            if slot.offset + slot.bytes <= other.offset:
                break
            slot.offset = max(slot.offset, aligned(other.offset + other.bytes))
        placed.append(slot)
    return max((aligned(slot.offset + slot.bytes) for slot in placed), default=0)
