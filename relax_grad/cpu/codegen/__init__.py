"""Machine code of tensor functions: parallel compilation, a cache directory, and the link into one
module."""

from __future__ import annotations

from .cache import cache

__all__ = ["cache"]
