"""A zoo of models by family; each has a function that makes it with its operands."""

from __future__ import annotations

from .dense import DETECTION, SEGMENTATION
from .generative import GENERATIVE
from .others import OTHERS
from .sequences import SEQUENCES
from .vision import VISION

FAMILIES = {
    "vision": VISION,
    "detection": DETECTION,
    "segmentation": SEGMENTATION,
    "sequences": SEQUENCES,
    "generative": GENERATIVE,
    "others": OTHERS,
}

#: Every model by name.
MODELS = {name: make for family in FAMILIES.values() for name, make in family.items()}
