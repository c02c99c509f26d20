"""Measure the shares of matrix products and of attention in training steps of PyTorch eager.

``python benchmarks/shares.py`` profiles the steps of ``benchmarks/measure.py`` that have attention.
A step whose products take as long as PyTorch's cannot take less than their share of PyTorch's time.
It writes the page's figures to ``docs/_measured/shares.json``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

THREADS = 2

#: The steps, by the names of their figures.
STEPS = {
    "gpt": "GPT, 6 layers, 384 wide, 4x256",
    "long_gpt": "GPT, 4 layers, 256 wide, 1x1024",
    "llama": "Llama, 4 layers, 384 wide, 4x256",
    "vit": "ViT-tiny, 8x3x224x224",
}

#: The operators of products.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")

#: Steps before the first one that is profiled, and profiled ones.
_WARM, _PROFILED = 3, 10


def main() -> None:
    args = _parser().parse_args()
    os.environ.update(dict.fromkeys(("TVM_NUM_THREADS", "OMP_NUM_THREADS"), str(THREADS)))
    import _models
    import torch
    from measure import processor

    torch.set_num_threads(THREADS)
    by_name = {step.name: step for step in _models.STEPS}
    figures = {key: _profiled(by_name[name]) for key, name in STEPS.items()}
    about = {
        "recorded": date.today().isoformat(),
        "processor": processor(),
        "threads": THREADS,
        "torch": torch.__version__,
    }
    unit = "percent of the time of a training step of PyTorch eager"
    text = json.dumps({"about": about, "unit": unit, **figures}, indent=1)
    args.out.write_text(text + "\n")
    print(text)


def _profiled(step) -> dict[str, int]:
    """Return the shares of a step."""
    import _steps
    from torch.profiler import ProfilerActivity, profile

    run = _steps.in_torch(*_steps.initial(step), is_compiled=False)
    for _ in range(_WARM):
        run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(_PROFILED):
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(__file__).parents[1] / "docs/_measured/shares.json"
    parser.add_argument("--out", type=Path, default=default)
    return parser


if __name__ == "__main__":
    main()
