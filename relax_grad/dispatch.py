"""Deprecated: the module is :mod:`relax_grad.cpu.dispatch`."""

from __future__ import annotations

import warnings

from .cpu.dispatch import *  # noqa: F403

warnings.warn(
    "relax_grad.dispatch is relax_grad.cpu.dispatch now; the old name goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)
