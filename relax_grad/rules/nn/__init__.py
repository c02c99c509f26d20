"""Gradient rules of ``relax.op.nn``."""

from . import conv, loss, norm, pool
