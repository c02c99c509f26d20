"""Functions that converters of several families share."""

from __future__ import annotations


class Refused(Exception):
    """A node cannot be imported as PyTorch defines it; the message says why, and how to go on."""
