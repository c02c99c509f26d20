"""The search for a smaller program that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

ProgramType = TypeVar("ProgramType")


def smallest(
    program: ProgramType,
    fails: Callable[[ProgramType], bool],
    candidates: Callable[[ProgramType], Iterable[ProgramType]],
    key: Callable[[ProgramType], Hashable],
    sound: Iterable[ProgramType] = (),
) -> ProgramType:
    """Shrink a program until none of its candidates fails, or until the time is up.

    Parameters
    ----------
    program
        A program that fails.
    fails : Callable
        Tells whether a program fails in the same way; raises ``TimeoutError`` to end the search.
    candidates : Callable
        Returns smaller programs than a given one.
    key : Callable
        Returns the identity of a program. Many programs share candidates, and each candidate is
        tried once.
    sound : Iterable
        Programs that are known to be sound.
    """
    tried = set(map(key, sound))
    try:
        while True:
            for candidate in candidates(program):
                if key(candidate) in tried:
                    continue
                if fails(candidate):
                    program = candidate
                    break
                tried.add(key(candidate))
            else:
                return program
    except TimeoutError:
        return program
