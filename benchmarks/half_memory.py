"""Write the planned memory of training steps in half precision, beside float32.

``python benchmarks/half_memory.py`` plans the steps of a GPT and of convolutional networks with SGD
and writes the bytes to docs/_measured/half_memory.json. Nothing runs. In half precision, the
trainer keeps a copy of the parameters in float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from _models import STEPS, Step

from relax_grad.frontend.torch import from_module
from relax_grad.training import SGD, Memory, memory_of, train_step

RESULTS = Path(__file__).parents[1] / "docs" / "_measured" / "half_memory.json"
DTYPES = ("float32", "bfloat16", "float16")

#: The beginnings of the names of the measured steps.
NAMES = ("GPT, 4 layers", "ResNet-9", "ResNet-18", "U-Net", "ViT-tiny")


def main() -> int:
    steps = [step for step in STEPS if step.name.startswith(NAMES)]
    rows = [{"step": step.name, "memory": planned(step)} for step in steps]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def planned(step: Step, dtypes: Sequence[str] = DTYPES) -> dict[str, dict[str, int]]:
    """Return the bytes of a step in each dtype, by the attributes of ``Memory``."""
    return {dtype: asdict(memory(step, dtype)) for dtype in dtypes}


def memory(step: Step, dtype: str) -> Memory:
    """Return the planned memory of a step in a dtype."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    network = step.network().train().to(kind)
    batch = tuple(x.to(kind) if x.is_floating_point() else x for x in step.inputs())
    imported = from_module(network, batch)
    return memory_of(train_step(imported.module, SGD(0.1), wrt=list(imported.params)))


if __name__ == "__main__":
    sys.exit(main())
