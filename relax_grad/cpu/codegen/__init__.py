"""Machine code of tensor functions: compiled in threads, kept in a directory, put together."""

from __future__ import annotations

from .cache import cache

__all__ = ["cache"]
