"""Ratios of paired samples, and measurements for each width of vectors: that of this machine, and
AVX2, to which PyTorch is held too."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING

from _benchmark import Layout, Rows, facts

if TYPE_CHECKING:
    import tvm
    from rows import Row

#: For each width of vectors: the compiler's flags, and PyTorch's environment.
WIDTHS: dict[str, tuple[list[str], dict[str, str]]] = {
    "host": (["-march=native"], {}),
    "avx2": (
        ["-mavx2", "-mfma"],
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
}


def width_of(args: Namespace) -> str:
    """Return the width of vectors of this process."""
    return args.vectors[0] if args.vectors else "host"


def clock_of(threads: int) -> Callable[[], float]:
    """Return the clock of samples: one thread is measured by its processor time, for machines that
    are not idle."""
    return time.thread_time if threads == 1 else time.perf_counter


def head(args: Namespace, units: Mapping[str, str], peaks: Sequence[int] = ()) -> dict:
    """Return the head of a file with a part for each width, and the other parts of the file.

    Parameters
    ----------
    args : Namespace
        The options.
    units : Mapping[str, str]
        The units of the figures.
    peaks : Sequence[int]
        The numbers of threads whose peak the part has.
    """
    from _cores import peak

    threads = int(os.environ["TVM_NUM_THREADS"])
    clock = "processor time" if threads == 1 else "wall time"
    about = {**facts("date", "processor", "threads"), "clock": clock, "units": dict(units)}
    width = width_of(args)
    part = {"target": target_of(width)}
    if peaks and args.json:
        rates = [round(peak(WIDTHS[width][0], count)) for count in peaks]
        part["peak"] = rates if len(rates) > 1 else rates[0]
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text("utf-8"))
        if all(known.get(key, about[key]) == about[key] for key in ("processor", "threads")):
            about.update({key: known[key] for key in WIDTHS if key in known and key != width})
    return {**about, width: part}


def _packed(head: dict, rows: Rows) -> dict:
    """Return the contents of a file: the rows stand in the last part, and whole steps have a list
    of their own."""
    *_, width = head
    steps = [{"name": name, **row} for name, row in rows.items() if "sizes" not in row]
    plain = [row for row in rows.values() if "sizes" in row]
    return {**head, width: {**head[width], "rows": plain, **({"steps": steps} if steps else {})}}


#: The layout of a file with a part for each width.
LAYOUT = Layout(_packed)


def prepared(args: Namespace) -> tvm.target.Target:
    """Set the threads of relax_grad and PyTorch, and return relax_grad's target for the width."""
    import torch
    import tvm

    import relax_grad

    threads = int(os.environ["TVM_NUM_THREADS"])
    torch.set_num_threads(threads)
    relax_grad.set_num_threads(threads)
    mcpu = target_of(width_of(args))
    return tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": threads})


def target_of(width: str | None) -> str:
    """Return LLVM's name of this processor, or, for AVX2, of processors with it whose kernels suit
    this one."""
    import relax_grad

    host = relax_grad.target.host()
    if width != "avx2":
        return str(host.attrs["mcpu"])
    return "haswell" if relax_grad.target.CPU.of(host).tuning.is_named else "x86-64-v3"


def against_torch(row: Row, target: tvm.target.Target, tolerance: float) -> dict[str, Callable]:
    """Return calls of a row of the benchmark by relax_grad and by PyTorch, after a comparison of
    their results."""
    from _contestants import contestants, difference

    by_column = contestants(row, ["relax_grad", "torch"], target)
    ours, theirs = by_column["relax_grad"], by_column["torch"]
    error = 0.0 if row.is_random else difference(ours.results, theirs.results)
    if not error < tolerance:
        raise ValueError(f"{row.name}: the results differ by {error:.1e} of the largest element")
    return {"relax_grad": ours.run, "torch": theirs.run}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of paired samples."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return digits(ratios[len(ratios) // 2])


def digits(ratio: float) -> float:
    """Return a ratio with two digits after the point, or two digits."""
    return round(ratio, 2) if ratio > 0.1 else float(f"{ratio:.1e}")


def summary(rows: Rows, group_of: Callable[[dict], str], ratio_of: Callable[[dict], float]) -> str:
    """Return a line for each group of rows: the number, the geometric mean of the ratios, and the
    largest one."""
    groups: dict[str, Rows] = {}
    for name, row in rows.items():
        groups.setdefault(group_of(row), {})[name] = ratio_of(row)
    return "\n".join(
        f"{group}: {len(own)} rows, mean {geometric_mean(own.values()):.2f}, "
        f"{sum(ratio > 1 for ratio in own.values())} above 1; "
        f"most {max(own.values()):.2f}, {max(own, key=own.__getitem__)}"
        for group, own in groups.items()
    )
