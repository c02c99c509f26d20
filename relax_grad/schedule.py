"""Deprecated: the module is :mod:`relax_grad.cpu.schedule`."""

from __future__ import annotations

import warnings

from .cpu.schedule import *  # noqa: F403

warnings.warn(
    "relax_grad.schedule is now relax_grad.cpu.schedule; the next release removes the old name",
    DeprecationWarning,
    stacklevel=2,
)
