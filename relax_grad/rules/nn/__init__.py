"""Gradient rules of ``relax.op.nn``."""

from . import activation, conv, loss, norm, pool
