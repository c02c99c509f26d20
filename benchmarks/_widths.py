"""Measurements for each width of vectors: that of this machine, and AVX2, to which PyTorch is held
too.

A script measures each width in a process of its own, and writes a file for each machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from chart import file_of_machine
from measure import processor

if TYPE_CHECKING:
    import tvm
    from rows import Row

HERE = Path(__file__).parent

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


def parser(description: str, folder: str, repeats: int) -> argparse.ArgumentParser:
    """Return the parser of the options that these scripts share."""
    arguments = argparse.ArgumentParser(description=description.partition("\n")[0])
    arguments.add_argument("--vectors", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    arguments.add_argument(
        "--repeats", type=int, default=repeats, help=f"samples of each (default: {repeats})"
    )
    arguments.add_argument("--out", type=Path, default=HERE.parent / "docs/_measured" / folder)
    arguments.add_argument("--part", choices=WIDTHS, help=argparse.SUPPRESS)
    return arguments


def write(
    script: str,
    args: argparse.Namespace,
    about: dict,
    summary: Callable[[str, dict], str],
    options: Sequence[str] = (),
) -> None:
    """Measure each width in a process of its own, print its summary, and write the file of this
    machine.

    Parameters
    ----------
    script : str
        The path of the script. With the option ``--part WIDTH``, its last line is the JSON of this
        width.
    args : argparse.Namespace
        The options of :func:`parser`.
    about : dict
        The head of the file beside the date and the processor; ``threads`` is the number of
        threads.
    summary : Callable
        Returns the text for a width and its measurements.
    options : Sequence[str]
        Further options of the script.
    """
    result = {"date": date.today().isoformat(), "processor": processor(), **about}
    for width in args.vectors:
        command = [sys.executable, script, "--part", width, "--repeats", str(args.repeats)]
        threads = dict.fromkeys(("TVM_NUM_THREADS", "OMP_NUM_THREADS"), str(about["threads"]))
        environment = {**os.environ, **WIDTHS[width][1], **threads}
        made = subprocess.run(
            [*command, *options], env=environment, stdout=subprocess.PIPE, check=True
        )
        result[width] = json.loads(made.stdout.splitlines()[-1])
        print(summary(width, result[width]))
    path = args.out / file_of_machine(result, target_of(None))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(result))
    print(f"written to {path}")


def prepare(width: str, threads: int) -> tvm.target.Target:
    """Set the threads and the memory of relax_grad and PyTorch for a measurement, and return
    relax_grad's target."""
    import torch
    import tvm
    from _timing import raise_mmap_threshold

    import relax_grad

    torch.set_num_threads(threads)
    relax_grad.set_num_threads(threads)
    raise_mmap_threshold()
    return tvm.target.Target({"kind": "llvm", "mcpu": target_of(width), "num-cores": threads})


def against_torch(row: Row, target: tvm.target.Target, tolerance: float) -> dict[str, Callable]:
    """Return calls of a row of the benchmark by relax_grad and by PyTorch, after a comparison of
    their results."""
    from _contestants import contestants, difference

    by_column = contestants(row, ["relax_grad", "torch"], target)
    ours, theirs = by_column["relax_grad"], by_column["torch"]
    error = 0.0 if row.is_random else difference(ours.results, theirs.results)
    if not error < tolerance:
        raise SystemExit(f"{row.name}: the results differ by {error:.1e} of the largest element")
    return {"relax_grad": ours.run, "torch": theirs.run}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of paired samples."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return digits(ratios[len(ratios) // 2])


def digits(ratio: float) -> float:
    """Return a ratio with two digits after the point, or two digits."""
    return round(ratio, 2) if ratio > 0.1 else float(f"{ratio:.1e}")


def target_of(width: str | None) -> str:
    """Return LLVM's name of this processor, or, for AVX2, of processors with it whose kernels suit
    this one."""
    import relax_grad

    host = relax_grad.target.host()
    if width != "avx2":
        return str(host.attrs["mcpu"])
    return "haswell" if relax_grad.target.CPU.of(host).tuning.is_named else "x86-64-v3"


def _text(result: dict) -> str:
    """Return JSON with a line for each row."""
    text = json.dumps(result, indent=1)
    return (
        re.sub(
            r"\{\s*(\"(?:group|sizes|name)\"[^}]*)\}",
            lambda m: "{" + " ".join(m[1].split()) + "}",
            text,
        )
        + "\n"
    )
