"""Extends the automatic differentiation of TVM Relax; importing it registers everything, once."""

from __future__ import annotations

from . import (
    _compat,  # first: refuses an unsupported TVM before anything else touches it
    legalize,
    op,
    registry,
    rules,
)
from .errors import GradientCheckError, GradientError
from .registry import register_gradient, register_legalize

__version__ = "0.1.0"

registry.install()

__all__ = [
    "GradientCheckError",
    "GradientError",
    "__version__",
    "register_gradient",
    "register_legalize",
]
