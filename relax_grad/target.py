"""The capabilities of a CPU target, and the target of this machine."""

from __future__ import annotations

from .cpu.target import CPU, host

__all__ = ["CPU", "host"]
