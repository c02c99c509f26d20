"""Gradient rules of ``relax.op.nn``."""

from . import (
    activation,
    attention,
    conv,
    dropout,
    loss,
    norm,
    pad,
    pool,
)
