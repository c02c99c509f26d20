"""Planned memory of steps in half precision and float32, for docs/trainer.md.

Nothing runs. In half precision, the trainer keeps a copy of the parameters in float32.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

import torch
from _benchmark import Benchmark, Layout
from _models import STEPS, Step

from relax_grad.frontend.torch import from_module
from relax_grad.training import SGD, memory_of, train_step

#: The beginnings of the names of the steps.
NAMES = ("GPT, 4 layers", "ResNet-9", "ResNet-18", "U-Net", "ViT-tiny")


def measured(step: Step, args: Namespace) -> dict[str, dict[str, int]]:
    """Return the bytes of a step in each dtype, by the attributes of ``Memory``."""
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        network = step.network().train().to(kind)
        batch = tuple(x.to(kind) if x.is_floating_point() else x for x in step.inputs())
        imported = from_module(network, batch)
        made = train_step(imported.module, SGD(0.1), wrt=list(imported.params))
        found[dtype] = asdict(memory_of(made))
    return found


BENCHMARK = Benchmark(
    rows=lambda args: {step.name: step for step in STEPS if step.name.startswith(NAMES)},
    measure=measured,
    json="half_memory.json",
    layout=Layout(
        lambda head, rows: [{"step": name, "memory": row} for name, row in rows.items()],
        lambda contents: {row["step"]: row["memory"] for row in contents},
    ),
)
