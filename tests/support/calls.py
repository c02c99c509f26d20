"""Modules with a single call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import programs
import tvm
from programs import tensor
from tvm import relax

__all__ = ["build", "tensor"]


def build(params: Sequence[relax.Var], body: Callable) -> tvm.IRModule:
    """Return a module whose ``main`` returns ``body(*params)``."""
    return programs.build(params, lambda _builder, *arguments: body(*arguments))
