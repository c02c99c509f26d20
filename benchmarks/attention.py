"""Measure attention against PyTorch's scaled_dot_product_attention, for each width of vectors.

``python benchmarks/attention.py`` measures attention without and with its gradients at lengths of
128 to 4096, interleaved, and training steps of a GPT, and writes
``docs/_measured/attention/PROCESSOR.json``: a file for each machine. PyTorch is held to AVX2 for
the columns of AVX2. The peak is that of multiply-adds in registers.

``--processor-time`` measures one thread by its processor time, for a machine that is not idle.

``--written-out`` measures the operator beside the same attention written out, over a grid of sizes,
in one thread by its processor time. It writes ``docs/_measured/attention/written_out/``. The
operator should take at most 1.05 of the time: where it takes more,
``relax_grad.transform.FuseAttention`` should leave the attention.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from _cores import peak
from _widths import (
    WIDTHS,
    against_torch,
    median_ratio,
    parser,
    prepare,
    target_of,
    write,
)

#: The batch, the length, the number of heads and their size, and the number of heads of the keys:
#: None for as many.
SIZES = [
    *(((batch, length, 12, 64), None) for batch, length in ((8, 128), (4, 256), (2, 512))),
    ((1, 1024, 12, 64), None),
    ((1, 2048, 6, 64), None),
    ((1, 4096, 2, 64), None),
    ((8, 128, 8, 128), None),
    ((2, 512, 8, 128), None),
    ((1, 1024, 8, 128), None),
    ((1, 2048, 4, 128), None),
    ((1, 4096, 2, 128), None),
    ((1, 1024, 12, 64), 4),
    ((1, 1024, 8, 128), 2),
    ((1, 2048, 8, 64), 1),
]

#: Sizes that are also measured with a causal mask and dropout of the weights at a rate.
DROPPED = [(8, 128, 12, 64), (2, 512, 12, 64), (1, 1024, 12, 64), (1, 2048, 6, 64)]
RATE = 0.1

#: The training steps, by their names in ``_models.py``.
STEPS = ("GPT, 6 layers, 384 wide, 4x256", "GPT, 4 layers, 256 wide, 1x1024")


def main() -> None:
    args = _parser().parse_args()
    if args.part is not None:
        measured = _beside_written_out if args.written_out else _measured
        print(json.dumps(measured(args.part, args)))
        return
    if args.written_out:
        about = {
            "threads": 1,
            "clock": "processor time",
            "units": {
                "us": "microseconds of the operator: forward, and forward with gradients; the "
                "least times",
                "written_out_us": "microseconds of the form that is written out",
                "median": "time of the operator / time of the other form, the median of paired "
                "samples",
            },
        }
        args.out /= "written_out"
        write(__file__, args, about, _summary_beside_written_out, ["--written-out"])
        return
    about = {
        "threads": 1 if args.processor_time else 2,
        "clock": "processor time" if args.processor_time else "wall time",
        "units": {
            "peak": "GFLOP/s of the threads",
            "us": "microseconds of relax_grad: forward, and forward with gradients; the least "
            "times",
            "torch_us": "microseconds of PyTorch",
            "median": "time of relax_grad / time of PyTorch, the median of paired samples",
            "memory": "memory that a step adds, in bytes: relax_grad's and PyTorch's",
            "torch.compile": "median time of relax_grad / median time of torch.compile",
        },
    }
    options = ["--processor-time"] if args.processor_time else []
    write(__file__, args, about, _summary, options)


def _measured(width: str, args: argparse.Namespace) -> dict:
    """Return the peak and the rows of a width; in a process whose environment holds PyTorch to this
    width."""
    clock = time.thread_time if args.processor_time else time.perf_counter
    threads = _threads(clock)
    target = prepare(width, threads)
    before = peak(WIDTHS[width][0], threads)
    rows = [
        *(
            _row(sizes, is_causal, key_heads, None, target, args.repeats, clock)
            for sizes, key_heads in SIZES
            for is_causal in (False, True)
        ),
        *(_row(sizes, True, None, RATE, target, args.repeats, clock) for sizes in DROPPED),
    ]
    steps = [_step(name, width, target, args.repeats, clock) for name in STEPS]
    return {
        "target": target_of(width),
        "peak": round(max(before, peak(WIDTHS[width][0], threads))),
        "rows": rows,
        "steps": steps,
    }


def _beside_written_out(width: str, args: argparse.Namespace) -> dict:
    """Return the rows of the grid for a width."""
    from _written_out import rows

    return {"target": target_of(width), "rows": rows(prepare(width, 1), args.repeats)}


def _summary_beside_written_out(width: str, part: dict) -> str:
    from _written_out import summary

    return f"{width} ({part['target']}):\n{summary(part['rows'])}"


def _threads(clock) -> int:
    """Return the number of threads of a measurement by this clock."""
    return 1 if clock is time.thread_time else 2


def _row(
    sizes: tuple,
    is_causal: bool,
    key_heads: int | None,
    rate: float | None,
    target,
    repeats: int,
    clock,
) -> dict:
    """Return the times of a size without and with gradients, after a comparison of the results."""
    from _timing import measure
    from rows.attentions import rows

    calls = {}
    forms = rows(sizes, is_causal, key_heads, rate)
    for name, row in zip(("forward", "both"), forms, strict=True):
        for column, run in against_torch(row, target, 1e-4).items():
            calls[name if column == "relax_grad" else f"{column} {name}"] = run
    times = measure(calls, repeats, 40, clock, _threads(clock), binds=True)
    batch, length, heads, features = sizes
    #: The multiply-adds of two products of each query and each key that it attends to.
    pairs = length * (length + 1) // 2 if is_causal else length**2
    result = {
        "sizes": list(sizes),
        "key_heads": key_heads,
        "causal": is_causal,
        "rate": rate,
        "us": [round(min(times[name]) * 1e6, 1) for name in ("forward", "both")],
        "torch_us": [round(min(times[f"torch {name}"]) * 1e6, 1) for name in ("forward", "both")],
        "median": [
            median_ratio(times[name], times[f"torch {name}"]) for name in ("forward", "both")
        ],
        "flops": 4 * batch * heads * pairs * features,
    }
    print(result, file=sys.stderr, flush=True)
    return result


def _step(name: str, width: str, target, repeats: int, clock) -> dict:
    """Return the time and the memory of a training step beside those of PyTorch, and of
    torch.compile for this machine."""
    import _memory
    from _contestants import contestants, difference
    from _models import STEPS as KNOWN
    from _timing import measure

    (step,) = (candidate for candidate in KNOWN if candidate.name == name)
    columns = ["relax_grad", "torch", *(["torch.compile"] if width == "host" else [])]
    by_column = contestants(step, columns, target)
    error = difference(by_column["relax_grad"].results, by_column["torch"].results)
    if not error < 1e-3:
        raise SystemExit(f"{name}: the results differ by {error:.1e} of the largest element")
    times = measure(
        {column: contestant.run for column, contestant in by_column.items()},
        repeats,
        60,
        clock,
        _threads(clock),
        binds=True,
    )
    result = {
        "name": name,
        "ms": round(min(times["relax_grad"]) * 1e3, 1),
        "median": median_ratio(times["relax_grad"], times["torch"]),
    }
    if "torch.compile" in times:
        result["torch.compile"] = median_ratio(times["relax_grad"], times["torch.compile"])
    memory = [
        _memory.peak(name, column, by_column[column].executable, by_column[column].arrays)
        for column in ("relax_grad", "torch")
    ]
    if None not in memory:
        result["memory"] = memory
    print(result, file=sys.stderr, flush=True)
    return result


def _summary(width: str, part: dict) -> str:
    lines = [f"{width} ({part['target']}): peak {part['peak']} GFLOP/s"]
    for i, what in enumerate(("forward", "forward and gradients")):
        worst = max(part["rows"], key=lambda row: row["median"][i])
        lines.append(
            f"  {what}: at most {worst['median'][i]:.2f} of PyTorch's time, at {worst['sizes']}"
            + (", causal" if worst["causal"] else "")
            + (f", dropout {worst['rate']}" if worst["rate"] else "")
        )
    lines += [f"  {step['name']}: {step['median']:.2f} of PyTorch's time" for step in part["steps"]]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    arguments = parser(__doc__, "attention", 7)
    arguments.add_argument(
        "--processor-time", action="store_true", help="measure one thread by its processor time"
    )
    arguments.add_argument(
        "--written-out",
        action="store_true",
        help="measure the operator beside attention that is written out, over a grid of sizes",
    )
    return arguments


if __name__ == "__main__":
    main()
