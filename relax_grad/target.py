"""The capabilities of a CPU target, the target of this machine, and targets of other processors."""

from __future__ import annotations

from .cpu.target import CPU, arm, host, wasm, x86_64

__all__ = ["CPU", "arm", "host", "wasm", "x86_64"]
