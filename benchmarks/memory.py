"""Memory and time of steps with recomputation beside PyTorch, for docs/trainer.md.

The steps run without recomputation, with ``remat="light"`` and ``"auto"``, with a policy, and
within budgets, which are shares of the planned peak without recomputation. The times are measured
in turn in one process. Each peak is the resident memory that steps add to a process of their own.
"""

from __future__ import annotations

import time
from argparse import Namespace

import _charts
import _figures
import _memory
import _steps
import tvm
from _benchmark import Benchmark, Layout, Rows, beginning, facts
from _models import STEPS, Step
from _timing import measure
from tvm import relax

import relax_grad
from relax_grad.training import memory_of

NAMES = ("ResNet-18", "GPT, 6 layers", "GPT, 4 layers, 256 wide, 1x1024", "ViT-tiny")
POLICY = "dots_with_no_batch_dims_saveable"

#: The budgets, as shares of the planned peak without recomputation.
SHARES = (0.8, 0.6, 0.25)


def measured(step: Step, args: Namespace) -> dict:
    """Return the figures of each setting of a step."""
    network, inputs = _steps.initial(step)
    whole = memory_of(_steps.in_relax(network, inputs)[0]).peak
    settings = {"none": None, "light": "light", "auto": "auto", POLICY: POLICY}
    settings.update({f"{share:.0%} of the peak": int(share * whole) for share in SHARES})
    runs = {"PyTorch": _steps.in_torch(network, inputs, False)}
    rows: dict[str, dict] = {}
    for name, remat in settings.items():
        try:
            made, arrays = _steps.in_relax(network, inputs, remat=remat)
            planned = memory_of(made).peak
        except ValueError as error:  # no plan has so little memory
            print(f"{step.name}, {name}: {error}".splitlines()[-1])
            continue
        start = time.perf_counter()
        executable = tvm.compile(
            _steps.in_place(made), relax_grad.target.host(), relax_pipeline="relax_grad"
        )
        spent = time.perf_counter() - start
        function = relax.VirtualMachine(executable, tvm.cpu())["step"]
        tensors = _steps.tensors_of(arrays)
        runs[name] = lambda function=function, tensors=tensors: function(*tensors)
        rows[name] = {
            "planned": planned,
            "measured": _memory.peak(step.name, "relax_grad", executable, arrays),
            "compiling_s": round(spent, 1),
        }
    rows["PyTorch"] = {"measured": _memory.peak(step.name, "torch")}
    samples = measure(runs, args.repeats, args.seconds, threads=facts("threads")["threads"])
    for name, row in rows.items():
        row["ms"] = round(min(samples[name]) * 1e3, 2)
    for row in rows.values():
        row["memory"] = round(row["measured"] / rows["PyTorch"]["measured"], 3)
        row["time"] = round(row["ms"] / rows["PyTorch"]["ms"], 3)
    return rows


def _packed(head: dict, rows: Rows) -> dict:
    flat = [
        {"step": step, "remat": name, **row}
        for step, settings in rows.items()
        for name, row in settings.items()
    ]
    return {**head, "rows": flat}


def _drawn(contents: dict) -> None:
    _figures.draw_memory(contents)
    print(*_figures.memory_table(contents), sep="\n")
    _charts.draw_steps()


BENCHMARK = Benchmark(
    rows=lambda args: beginning(NAMES, {step.name: step for step in STEPS}),
    measure=measured,
    json="memory.json",
    head=lambda args: facts("date", "processor", "target", "threads", "tvm", "torch"),
    layout=Layout(_packed),
    draw=_drawn,
    repeats=15,
    seconds=60.0,
)
