"""Passes over modules: differentiation, and the passes of the pipeline for CPUs."""

from __future__ import annotations

import warnings

from ..autodiff.gradient import Gradient
from ..cpu import passes
from ..cpu.passes import (
    DivideSlices,
    FoldConstants,
    InlineSingleUse,
    JoinProducts,
    JoinSlices,
    LiftBranches,
    Rematerialize,
    ReorderForPeakMemory,
    ShareStorage,
)

#: The passes that had other names, which warn.
_RENAMED = {
    "InlineOnlyCalls": "InlineSingleUse",
    "MergeElements": "FuseSiblings",
    "OrderForMemory": "ReorderForPeakMemory",
}


def __getattr__(name: str):
    if name in _RENAMED:
        warnings.warn(
            f"relax_grad.transform.{name} is now {_RENAMED[name]}; the next release removes the "
            "old name",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(passes, _RENAMED[name])
    if name in __all__:  # one that only compiling needs
        return getattr(passes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = ["Gradient", *passes.__all__]
