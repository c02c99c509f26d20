"""The search for a smaller program that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable


def smallest(
    program,
    fails: Callable,
    candidates: Callable[..., Iterable],
    key: Callable[..., Hashable],
    sound: Iterable = (),
):
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
    sound = set(map(key, sound))
    try:
        while True:
            for candidate in candidates(program):
                if key(candidate) in sound:
                    continue
                if fails(candidate):
                    program = candidate
                    break
                sound.add(key(candidate))
            else:
                return program
    except TimeoutError:
        return program
