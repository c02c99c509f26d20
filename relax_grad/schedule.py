"""Deprecated: the module is :mod:`relax_grad.cpu.schedule`."""

from __future__ import annotations

import warnings

from .cpu.schedule import *  # noqa: F403

warnings.warn(
    "relax_grad.schedule is relax_grad.cpu.schedule now; the old name goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)
