"""The garbage collector of Python during a compilation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the search for reference cycles.

    A compilation makes millions of objects and few cycles. The collector looks through all of them
    again and again, for a twentieth of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
