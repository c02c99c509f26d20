"""Attention beside PyTorch's, and training steps of a GPT, for docs/cpu.md.

Attention without and with its gradients has lengths of 128 to 4096. The peak is that of
multiply-adds in registers. ``--vectors host avx2`` measures both widths of vectors, and
``--threads 1`` measures processor time, for a machine that is not idle.
"""

from __future__ import annotations

from argparse import Namespace

import _memory
import _paired
from _benchmark import Benchmark, facts
from _contestants import contestants, difference
from _models import STEPS, Step
from _paired import median_ratio
from _timing import measure
from rows import attentions

#: The batch, the length, the number of heads and their size, and the number of heads of the keys:
#: None for as many.
SIZES = [
    *(((batch, length, 12, 64), None) for batch, length in ((8, 128), (4, 256), (2, 512))),
    *(((1, 1024, 12, 64), None), ((1, 2048, 6, 64), None), ((1, 4096, 2, 64), None)),
    *(((8, 128, 8, 128), None), ((2, 512, 8, 128), None), ((1, 1024, 8, 128), None)),
    *(((1, 2048, 4, 128), None), ((1, 4096, 2, 128), None)),
    *(((1, 1024, 12, 64), 4), ((1, 1024, 8, 128), 2), ((1, 2048, 8, 64), 1)),
]

#: Sizes that are also measured with a causal mask and dropout of the weights at a rate.
DROPPED = [(8, 128, 12, 64), (2, 512, 12, 64), (1, 1024, 12, 64), (1, 2048, 6, 64)]
RATE = 0.1

#: The training steps, by their names in ``_models.py``.
_STEPS = ("GPT, 6 layers, 384 wide, 4x256", "GPT, 4 layers, 256 wide, 1x1024")

_KINDS = ("forward", "both")


def rows(args: Namespace) -> dict:
    """Return the calls, as arguments of :func:`rows.attentions.rows`, and the steps."""
    calls = [(sizes, causal, heads, None) for sizes, heads in SIZES for causal in (False, True)]
    calls += [(sizes, True, None, RATE) for sizes in DROPPED]
    named = {attentions.rows(*call)[0].name: call for call in calls}
    return {**named, **{step.name: step for step in STEPS if step.name in _STEPS}}


def measured(row: tuple | Step, args: Namespace) -> dict:
    """Return the times of a call or a step."""
    return _step(row, args) if isinstance(row, Step) else _call(row, args)


def _times(calls: dict, args: Namespace) -> dict[str, list[float]]:
    threads = facts("threads")["threads"]
    clock = _paired.clock_of(threads)
    return measure(calls, args.repeats, args.seconds, clock, threads, binds=True)


def _call(row: tuple, args: Namespace) -> dict:
    """Return the times without and with gradients, after a comparison of the results."""
    target, calls = _paired.prepared(args), {}
    for kind, form in zip(_KINDS, attentions.rows(*row), strict=True):
        for column, run in _paired.against_torch(form, target, 1e-4).items():
            calls[column, kind] = run
    times = _times(calls, args)
    sizes, is_causal, key_heads, rate = row
    batch, length, heads, features = sizes
    # The multiply-adds of two products of each query and each key that it attends to.
    pairs = length * (length + 1) // 2 if is_causal else length**2
    ours, theirs = ([times[column, kind] for kind in _KINDS] for column in ("relax_grad", "torch"))
    return {
        "sizes": list(sizes),
        "key_heads": key_heads,
        "causal": is_causal,
        "rate": rate,
        "us": [round(min(own) * 1e6, 1) for own in ours],
        "torch_us": [round(min(own) * 1e6, 1) for own in theirs],
        "median": [median_ratio(*both) for both in zip(ours, theirs, strict=True)],
        "flops": 4 * batch * heads * pairs * features,
    }


def _step(step: Step, args: Namespace) -> dict:
    """Return the time and the memory of a training step beside those of PyTorch, and of
    torch.compile for this machine."""
    compiled = ["torch.compile"] if _paired.width_of(args) == "host" else []
    by_column = contestants(step, ["relax_grad", "torch", *compiled], _paired.prepared(args))
    error = difference(by_column["relax_grad"].results, by_column["torch"].results)
    if not error < 1e-3:
        raise ValueError(f"{step.name}: the results differ by {error:.1e} of the largest element")
    times = _times({column: own.run for column, own in by_column.items()}, args)
    ours = times["relax_grad"]
    result = {"ms": round(min(ours) * 1e3, 1), "median": median_ratio(ours, times["torch"])}
    if "torch.compile" in times:
        result["torch.compile"] = median_ratio(ours, times["torch.compile"])
    memory = [
        _memory.peak(step.name, column, by_column[column].executable, by_column[column].arrays)
        for column in ("relax_grad", "torch")
    ]
    return result if None in memory else {**result, "memory": memory}


UNITS = {
    "peak": "GFLOP/s of the threads",
    "us": "microseconds of relax_grad: forward, and forward with gradients; the least times",
    "torch_us": "microseconds of PyTorch",
    "median": "time of relax_grad / time of PyTorch, the median of paired samples",
    "memory": "memory that a step adds, in bytes: relax_grad's and PyTorch's",
    "torch.compile": "median time of relax_grad / median time of torch.compile",
}


def _largest(row: dict) -> float:
    return max(row["median"]) if "sizes" in row else row["median"]


BENCHMARK = Benchmark(
    rows=rows,
    measure=measured,
    json="attention",
    head=lambda args: _paired.head(args, UNITS, (facts("threads")["threads"],)),
    layout=_paired.LAYOUT,
    summary=lambda rows: _paired.summary(
        rows, lambda row: "causal" if row.get("causal") else "all", _largest
    ),
    seconds=40.0,
)
