"""The passes of the pipeline for CPUs."""

from __future__ import annotations

import importlib
from typing import Any

from .attention.fuse import FuseAttention
from .divide import DivideSlices
from .fold import FoldConstants
from .inline import InlineSingleUse
from .join import JoinSlices
from .lift import LiftBranches
from .products import JoinProducts
from .remat.rematerialize import Rematerialize
from .reorder import ReorderForPeakMemory
from .storage import ShareStorage

#: Passes that need kernels and schedules, which take a while to import.
_LAZY = {"DispatchKernels": "dispatch", "FuseSiblings": "siblings", "ScheduleLoops": "schedule"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "DispatchKernels",
    "DivideSlices",
    "FoldConstants",
    "FuseAttention",
    "FuseSiblings",
    "InlineSingleUse",
    "JoinProducts",
    "JoinSlices",
    "LiftBranches",
    "Rematerialize",
    "ReorderForPeakMemory",
    "ScheduleLoops",
    "ShareStorage",
]
