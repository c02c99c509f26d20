"""Machine code of tensor functions: compiled one by one in threads, kept in a directory, put together."""

from __future__ import annotations

from .cache import cache

__all__ = ["cache"]
