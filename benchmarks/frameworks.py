"""Training steps of several frameworks, for the chart of the first page.

An MLP, ResNet-18, GPT and ViT-tiny take turns: forward pass, backward pass and SGD in float32. TVM
alone, ``relax.training.SetupTrainer`` with TVM's default pipeline, runs in a process without
relax_grad. JAX is measured if it is installed. With ``--json``, the chart is drawn, and the table
of the first page is printed.
"""

from __future__ import annotations

import subprocess
from argparse import Namespace

import _charts
from _benchmark import Benchmark, beginning, facts, in_process, listed
from _contestants import contestants
from _models import STEPS, Step
from _timing import measure

NAMES = ("MLP", "ResNet-18", "GPT, 6 layers", "ViT-tiny")

#: The columns beside relax_grad, by their names in the chart.
CONTESTANTS = {"PyTorch": "torch", "torch.compile": "torch.compile", "JAX": "jax", "TVM": "TVM"}


def rows(args: Namespace) -> dict[str, Step]:
    """Return the steps."""
    return beginning(NAMES, {step.name: step for step in STEPS})


def measured(step: Step, args: Namespace) -> dict:
    """Return the least times of a step, with the reason for each that is missing."""
    asked = {name: CONTESTANTS[name] for name in args.against if name != "TVM"}
    by_column = contestants(step, ["relax_grad", *asked.values()], remat=None)
    runs = {name: by_column[c].run for name, c in asked.items() if c in by_column}
    runs = {"relax_grad": by_column["relax_grad"].run, **runs}
    samples = measure(runs, args.repeats, args.seconds, threads=facts("threads")["threads"])
    times: dict[str, float | None] = {
        name: round(min(samples[name]) * 1e3, 2) if name in samples else None
        for name in ("relax_grad", *asked)
    }
    reasons = {name: "an error" for name, time in times.items() if time is None}
    if "TVM" in args.against:
        found = _by_tvm(step.name, args)
        times["TVM"] = round(found["seconds"] * 1e3, 2) if "seconds" in found else None
        reasons.update({"TVM": found["reason"]} if "reason" in found else {})
    return {"ms": times, **({"reason": reasons} if reasons else {})}


def _by_tvm(name: str, args: Namespace) -> dict:
    """Return the time of TVM alone, or the reason why it cannot train the network."""
    try:
        return in_process("_stock", "measured", name, args.repeats, seconds=args.limit)
    except subprocess.TimeoutExpired:
        return {"reason": f"not compiled and run in {args.limit:.0f} s"}
    except RuntimeError as error:
        print(error)
        return {"reason": "an error"}


def head(args: Namespace) -> dict:
    jax = ["jax"] if "JAX" in args.against else []
    about = facts("date", "processor", "target", "threads", "tvm", "torch", *jax, "load")
    unit = "least milliseconds of a training step; null if the framework cannot train the network"
    return {**about, "unit": unit}


BENCHMARK = Benchmark(
    rows=rows,
    measure=measured,
    json="steps.json",
    head=head,
    layout=listed("step"),
    draw=_charts.draw_steps,
    seconds=15.0,
    options={
        "--against": {
            "nargs": "*",
            "choices": CONTESTANTS,
            "default": list(CONTESTANTS),
            "help": "the contestants (default: all)",
        },
        "--limit": {
            "type": float,
            "default": 60.0,
            "help": "seconds in which TVM alone must compile and run a step (default: 60)",
        },
    },
)
