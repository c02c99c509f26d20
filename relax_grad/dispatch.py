"""Deprecated: the module is :mod:`relax_grad.cpu.dispatch`."""

from __future__ import annotations

import warnings

from .cpu.dispatch import *  # noqa: F403

warnings.warn(
    "relax_grad.dispatch is now relax_grad.cpu.dispatch; the next release removes the old name",
    DeprecationWarning,
    stacklevel=2,
)
