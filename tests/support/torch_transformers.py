"""Transformers in tiny configurations with random weights, by family; all are held against PyTorch
itself.

Every entry is a function that returns a :class:`Model`. A library that is not installed raises
ImportError.
"""

from __future__ import annotations

# Each module enters its models into the tables.
import torch_transformers_decoders  # noqa: F401
import torch_transformers_encoders  # noqa: F401
import torch_transformers_images  # noqa: F401
import torch_transformers_translation  # noqa: F401
from torch_transformers_parts import FAMILIES, REFUSED, Model
from torch_transformers_plain import sequence

__all__ = ["FAMILIES", "REFUSED", "Model", "sequence"]
