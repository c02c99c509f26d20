"""Passes over modules."""

from __future__ import annotations

import importlib

from .divide import DivideSlices
from .fold import FoldConstants
from .gradient import Gradient
from .inline import InlineOnlyCalls
from .join import JoinSlices
from .lift import LiftBranches
from .memory import OrderForMemory
from .storage import ShareStorage

#: What only compiling needs: the kernels and schedules behind it take a while to import.
_LAZY = {"DispatchKernels": "dispatch", "MergeElements": "merge", "ScheduleLoops": "schedule"}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
