"""A zoo of models by family; each has a function that makes it with its operands."""

from __future__ import annotations

from torch_zoo_dense import DETECTION, SEGMENTATION
from torch_zoo_generative import GENERATIVE
from torch_zoo_others import OTHERS
from torch_zoo_sequences import SEQUENCES
from torch_zoo_vision import VISION

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
