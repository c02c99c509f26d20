"""Transformers in tiny configurations with random weights, by family; all are held against PyTorch
itself.

Every entry is a function that returns a :class:`Model`. A library that is not installed raises
ImportError.
"""

from __future__ import annotations

# Each module enters its models into the tables.
from . import (
    decoders,
    encoders,
    images,
    translation,
)
from .parts import FAMILIES, REFUSED, Model
from .plain import sequence

__all__ = ["FAMILIES", "REFUSED", "Model", "sequence"]
