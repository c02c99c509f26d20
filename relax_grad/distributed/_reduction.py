"""Reductions that have started."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Reduction:
    """A reduction that has started.

    Parameters
    ----------
    work : object
        The work of a library, with the methods of gloo's; None if there is nothing to wait
        for.
    finish : Callable
        Writes the result, after the work.
    is_beside : bool
        Whether the work runs beside the computations of the worker. Otherwise ``finish`` does it.

    Attributes
    ----------
    ended : float or None
        The time of ``time.perf_counter`` at which the work ended, as far as it is known.
    """

    def __init__(self, work: Any, finish: Callable[[], None], *, is_beside: bool = True):
        self._work, self._finish, self.is_beside = work, finish, is_beside
        self.ended: float | None = None
        if work is not None:
            work.get_future().add_done_callback(self._note)
        elif is_beside:
            self.ended = time.perf_counter()

    def _note(self, _future: object) -> None:
        self.ended = time.perf_counter()

    def wait(self) -> None:
        """Wait for the result."""
        if self._work is not None:
            self._work.wait()
        self._finish()


__all__ = ["Reduction"]
