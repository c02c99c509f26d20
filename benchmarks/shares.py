"""Shares of products and attention in steps of PyTorch eager, for docs/cpu.md.

A step whose products take as long as PyTorch's cannot take less than their share of PyTorch's time.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping

import _steps
from _benchmark import Benchmark, Layout, facts
from _models import STEPS as ALL
from _models import Step

#: The steps, by the names of their figures.
STEPS = {
    "gpt": "GPT, 6 layers, 384 wide, 4x256",
    "long_gpt": "GPT, 4 layers, 256 wide, 1x1024",
    "llama": "Llama, 4 layers, 384 wide, 4x256",
    "vit": "ViT-tiny, 8x3x224x224",
}

#: The operators of products.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")

#: Steps before the first one that is profiled.
_WARM = 3


def rows(args: Namespace) -> dict[str, Step]:
    """Return the steps."""
    by_name = {step.name: step for step in ALL}
    return {key: by_name[name] for key, name in STEPS.items()}


def measured(step: Step, args: Namespace) -> dict[str, int]:
    """Return the shares of a step."""
    from torch.profiler import ProfilerActivity, profile

    run = _steps.in_torch(*_steps.initial(step), is_compiled=False)
    for _ in range(_WARM):
        run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(args.repeats):
            run()
    events = profiler.key_averages()
    return shares({event.key: event.self_cpu_time_total for event in events})


def shares(times: Mapping[str, float]) -> dict[str, int]:
    """Return the percentages of products and of attention, from the own times of operators in any
    unit."""
    total = sum(times.values())

    def percent(names: Iterable[str]) -> int:
        return round(100 * sum(times[name] for name in names) / total)

    return {
        "products": percent(name for name in times if name in PRODUCTS),
        "attention": percent(name for name in times if "attention" in name),
    }


BENCHMARK = Benchmark(
    rows=rows,
    measure=measured,
    json="shares.json",
    head=lambda args: {
        "about": facts("recorded", "processor", "threads", "torch"),
        "unit": "percent of the time of a training step of PyTorch eager",
    },
    layout=Layout(lambda head, rows: {**head, **rows}),
    repeats=10,
)
