"""Passes over modules: differentiation, and what the pipeline for CPUs is made of."""

from __future__ import annotations

from ..autodiff.gradient import Gradient
from ..cpu import passes
from ..cpu.passes import (
    DivideSlices,
    FoldConstants,
    InlineOnlyCalls,
    JoinSlices,
    LiftBranches,
    OrderForMemory,
    ShareStorage,
)


def __getattr__(name: str):
    if name in __all__:  # one that only compiling needs
        return getattr(passes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "DispatchKernels",
    "DivideSlices",
    "FoldConstants",
    "Gradient",
    "InlineOnlyCalls",
    "JoinSlices",
    "LiftBranches",
    "MergeElements",
    "OrderForMemory",
    "ScheduleLoops",
    "ShareStorage",
]
