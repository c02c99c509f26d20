"""Dedicated backward operators: declaration, type inference and builder."""

from . import conv, index, loss, manipulate, pool, statistical
