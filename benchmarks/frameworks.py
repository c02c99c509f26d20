"""Measure training steps of several frameworks, for the chart of the first page.

``python benchmarks/frameworks.py`` measures an MLP, ResNet-18, GPT and ViT-tiny in turn in one
process: forward pass, backward pass and SGD in float32, by relax_grad and by the contestants of
``--against``. TVM alone, ``relax.training.SetupTrainer`` with TVM's default pipeline, runs in a
process without relax_grad. It writes docs/_measured/steps.json; ``python benchmarks/chart.py``
draws it. It takes about three minutes with two threads. JAX is measured if it is installed, in this
environment or in a folder of PYTHONPATH.

``--precision`` measures relax_grad and PyTorch in float32 and in mixed precision, by
``precision="bf16"`` and ``torch.autocast``: steps, and then products, convolutions, attention and a
recurrent layer, all inputs of which are bfloat16. It writes docs/_measured/half_steps.json and
docs/_measured/half_kernels.json, from which the pages of the documentation are made: this is the
command for a processor with tiles (AMX).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import _json_rows

ROOT = Path(__file__).parents[1]
NAMES = ("MLP", "ResNet-18", "GPT, 6 layers", "ViT-tiny")

#: The contestants beside relax_grad, by their names in the chart.
CONTESTANTS = ("PyTorch", "torch.compile", "JAX", "TVM")

#: The contestants in mixed precision, and those in float32 beside them.
HALF = ("relax_grad, bfloat16", "PyTorch, bfloat16", "torch.compile, bfloat16")
IN_BOTH = ("relax_grad", "PyTorch", *HALF)


def main() -> int:
    args = _parser().parse_args()
    from measure import _limit_threads, processor

    _limit_threads(args.threads)
    import torch
    from _models import STEPS
    from _timing import raise_mmap_threshold

    if args.precision:
        args.against, args.out = [], args.out or ROOT / "docs/_measured/half_steps.json"
    args.out = args.out or ROOT / "docs/_measured/steps.json"
    if "JAX" in args.against and importlib.util.find_spec("jax") is None:
        raise SystemExit(
            "JAX is not installed: pip install '.[bench]', or leave it out of --against"
        )
    torch.set_num_threads(args.threads)
    raise_mmap_threshold()
    about = {
        **_json_rows.about(processor(), args.threads),
        **({"jax": version("jax")} if "JAX" in args.against else {}),
        "load": round(os.getloadavg()[0], 1),  # of other programs, before the first step
        "unit": "least milliseconds of a training step; null if the framework cannot train the "
        "network",
    }
    steps = [step for name in NAMES for step in STEPS if step.name.startswith(name)]
    order = [step.name for step in steps]
    steps = [step for step in steps if (args.only or "") in step.name]
    kernels = _kernels(args)
    if not steps and not kernels:
        raise SystemExit(f"no step contains {args.only!r}")
    rows = _kept(args.out, about) if args.only else {}
    for step in steps:
        rows[step.name] = _measured(step, args)
        ordered = sorted(rows.values(), key=lambda row: order.index(row["step"]))
        _json_rows.write(args.out, about, ordered)  # a run that is interrupted keeps its rows
    if steps:
        print(f"written to {args.out}")
    if kernels:
        _measure_kernels(kernels, args, about)
    return 0


def _kernels(args: argparse.Namespace) -> list:
    """Return the kernels to measure: none without ``--precision``."""
    if not args.precision:
        return []
    import _halves

    return _halves.rows(args.only or "")


def _measure_kernels(kernels: list, args: argparse.Namespace, about: dict) -> None:
    """Measure kernels in both precisions, and write them beside the steps."""
    import _halves
    from _timing import measure

    path = args.out.with_name("half_kernels.json")
    about = {**about, "unit": "least milliseconds of a call; null if PyTorch cannot run it"}
    rows = _kept(path, about, "kernel") if args.only else {}
    for kernel in kernels:
        runs = _halves.contestants(kernel)
        samples = measure(runs, args.repeats, args.seconds, threads=args.threads)
        least = {
            name: round(min(samples[name]) * 1e3, 3) if name in samples else None
            for name in IN_BOTH
        }
        rows[kernel.name] = {"kernel": kernel.name, "ms": least}
        print(json.dumps(rows[kernel.name]), flush=True)
        ordered = sorted(rows.values(), key=lambda row: _halves.KERNELS.index(row["kernel"]))
        _json_rows.write(path, about, ordered)
    print(f"written to {path}")


def _kept(path: Path, about: dict, key: str = "step") -> dict[str, dict]:
    """Return the rows of a file by their names, if the machine and the versions are the same."""
    if not path.exists():
        return {}
    known = json.loads(path.read_text())
    same = ("processor", "target", "threads", "tvm", "torch", "jax")
    if any(known.get(key) != about.get(key) for key in same):
        return {}
    return {row[key]: row for row in known["rows"]}


def _measured(step, args: argparse.Namespace) -> dict:
    """Return the least times of a step, and print them."""
    from _timing import measure

    if args.precision:
        return _measured_in_both(step, args)
    runs, reasons = {"relax_grad": _by_relax_grad(step)}, {}
    for name in args.against:
        if name == "TVM":
            continue
        try:
            runs[name] = _by_others(step, name)
            runs[name]()  # it compiles
        except Exception:  # the others are still measured
            traceback.print_exc()
            runs.pop(name, None)
            reasons[name] = "an error"
    samples = measure(runs, args.repeats, args.seconds, threads=args.threads)
    least = {name: min(times) for name, times in samples.items()}
    if "TVM" in args.against:
        stock = _by_tvm(step, args)
        least.update({"TVM": stock["seconds"]} if "seconds" in stock else {})
        reasons.update({"TVM": stock["reason"]} if "reason" in stock else {})
    milliseconds = {
        name: round(least[name] * 1e3, 2) if name in least else None
        for name in ("relax_grad", *CONTESTANTS)
        if name in least or name in reasons
    }
    row = {"step": step.name, "ms": milliseconds, **({"reason": reasons} if reasons else {})}
    print(json.dumps(row), flush=True)
    return row


def _measured_in_both(step, args: argparse.Namespace) -> dict:
    """Return the least times of a step in float32 and in bfloat16, and print them."""
    from _timing import measure

    runs = {"relax_grad": _by_relax_grad(step), HALF[0]: _by_relax_grad(step, "bf16")}
    runs["PyTorch"] = _by_others(step, "PyTorch")
    for column in HALF[1:]:
        runs[column] = _by_others(step, column.partition(",")[0], is_half=True)
    for run in runs.values():
        run()  # torch.compile compiles
    samples = measure(runs, args.repeats, args.seconds, threads=args.threads)
    row = {"step": step.name, "ms": {name: round(min(samples[name]) * 1e3, 2) for name in IN_BOTH}}
    print(json.dumps(row), flush=True)
    return row


def _by_relax_grad(step, precision: str | None = None) -> Callable[[], object]:
    """Return a step as the trainer takes it, with the parameters in the memory of the old ones."""
    import _steps
    import numpy as np
    import tvm
    from tvm import relax

    import relax_grad
    from relax_grad.frontend.torch import from_module
    from relax_grad.training import SGD, train_step
    from relax_grad.training._donation import donating

    network, inputs = _steps.initial(step)
    made = train_step(from_module(network, inputs), SGD(lr=_steps.RATE), precision=precision)
    target = relax_grad.target.host()
    executable = tvm.compile(donating(made), target, relax_pipeline="relax_grad")
    function = relax.VirtualMachine(executable, tvm.cpu())["step"]
    scalars = [np.array(value, "float64") for value in made.hyperparameters.values()]
    arrays = [*(tensor.numpy() for tensor in inputs), *scalars, np.array(0, "int64")]
    arguments = [tvm.runtime.tensor(array) for array in arrays]
    arguments += [list(group.values()) for group in made.initial()]
    return lambda: function(*arguments)  # the step writes to its arguments


def _by_others(step, name: str, is_half: bool = False) -> Callable[[], object]:
    import _steps

    network, inputs = _steps.initial(step)
    if is_half:
        network = _steps.UnderAutocast(network)
    if name == "JAX":
        return _steps.in_jax(network, inputs)
    return _steps.in_torch(network, inputs, name == "torch.compile")


def _by_tvm(step, args: argparse.Namespace) -> dict:
    """Return the time of TVM alone, or the reason why it cannot train the network."""
    script = Path(__file__).with_name("_stock.py")
    command = [sys.executable, str(script), step.name, str(args.repeats)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        return {"reason": f"not compiled and run in {args.limit:.0f} s"}
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return {"reason": "an error"}
    return json.loads(done.stdout.splitlines()[-1])


def _parser() -> argparse.ArgumentParser:
    from _timing import add_options

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        metavar="TEXT",
        help="a part of the name of the step; the file keeps the others, of the same machine",
    )
    parser.add_argument(
        "--against",
        nargs="*",
        choices=CONTESTANTS,
        default=list(CONTESTANTS),
        help="the contestants (default: all)",
    )
    add_options(parser, "step", repeats=7, seconds=15.0)
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        help="seconds in which TVM alone must compile and run a step (default: 60)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the file of the results (default: docs/_measured/steps.json, or half_steps.json)",
    )
    parser.add_argument(
        "--precision", action="store_true", help="mixed precision beside float32, without --against"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
