"""The capabilities of a CPU target, the target of this machine, and targets of other processors."""

from __future__ import annotations

from .cpu.target import CPU, arm, cortex_m, host, riscv64, wasm, x86_64

__all__ = ["CPU", "arm", "cortex_m", "host", "riscv64", "wasm", "x86_64"]
