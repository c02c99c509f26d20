"""Passes over modules: differentiation, and the passes of the pipeline for CPUs."""

from __future__ import annotations

from ..autodiff.gradient import Gradient
from ..cpu import passes
from ..cpu.passes import (
    DivideSlices,
    FoldConstants,
    FuseAttention,
    InlineSingleUse,
    JoinProducts,
    JoinSlices,
    LiftBranches,
    Rematerialize,
    ReorderForPeakMemory,
    ShareStorage,
)
from ..ir.names import PlainNames
from .autocast import Autocast


def __getattr__(name: str) -> object:
    if name in __all__:  # one that only compiling needs
        return getattr(passes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = ["Autocast", "Gradient", "PlainNames", *passes.__all__]
