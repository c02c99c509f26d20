"""Measure the memory and the time of whole training steps with recomputation, beside PyTorch's.

``python benchmarks/memory.py`` measures ResNet-18, two GPTs and ViT-tiny: without recomputation,
with ``remat="light"`` and ``"auto"``, with a policy, and within budgets, which are shares of the
planned peak without recomputation. The times are measured in turn in one process. Each peak is that
of a process of its own: the resident memory that steps add. It writes memory.json to
benchmarks/results. ``--plot`` draws the figure of docs/trainer.md of these results, and prints the
rows of its table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _json_rows

NAMES = ("ResNet-18", "GPT, 6 layers", "GPT, 4 layers, 256 wide, 1x1024", "ViT-tiny")
POLICY = "dots_with_no_batch_dims_saveable"

#: The budgets, as shares of the planned peak without recomputation.
SHARES = (0.8, 0.6, 0.25)

_GROUPS = ("params", "frozen", "states", "optimizer_state")


def main() -> int:
    args = _parser().parse_args()
    if args.child:
        print(json.dumps(_growth(Path(args.child))))
        return 0
    if args.plot:
        import _memory_figure

        results = json.loads((args.out / "memory.json").read_text())
        _memory_figure.draw(results)
        print(*_memory_figure.table(results), sep="\n")
        return 0
    from measure import _limit_threads, processor

    _limit_threads(args.threads)
    import torch
    from _models import STEPS
    from _timing import raise_mmap_threshold

    torch.set_num_threads(args.threads)
    raise_mmap_threshold()
    about = _json_rows.about(processor(), args.threads)
    rows = []
    for step in STEPS:
        if step.name.startswith(NAMES) and (args.only or "") in step.name:
            rows += _measured(step, args)
    if not rows:
        raise SystemExit(f"no step contains {args.only!r}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "memory.json"
    _json_rows.write(path, about, rows)
    print(f"written to {path}")
    return 0


def _measured(step, args: argparse.Namespace) -> list[dict]:
    """Return a row for each setting of a step, and print it."""
    import _memory
    import _steps
    from _timing import measure

    from relax_grad.frontend.torch import from_module
    from relax_grad.training import SGD, memory_of, train_step

    network, inputs = _steps.initial(step)
    imported = from_module(network, inputs)

    def made(remat):
        return train_step(imported, SGD(lr=_steps.RATE), remat=remat)

    whole = memory_of(made(None)).peak
    settings = {"none": None, "light": "light", "auto": "auto", POLICY: POLICY}
    settings.update({f"{share:.0%} of the peak": int(share * whole) for share in SHARES})
    runs, rows = {"PyTorch": _steps.in_torch(network, inputs, False)}, {}
    for name, remat in settings.items():
        try:
            built = made(remat)
            planned = memory_of(built).peak
        except ValueError as error:
            print(f"{step.name}, {name}: {error}".splitlines()[-1])
            continue
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            runs[name] = _compiled(built, inputs, Path(folder))
            spent = time.perf_counter() - start
            command = [sys.executable, __file__, "--child", folder]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{step.name} with {name} failed:\n{done.stderr}")
        measured = json.loads(done.stdout.splitlines()[-1])
        rows[name] = {"planned": planned, "measured": measured, "compiling_s": round(spent, 1)}
    rows["PyTorch"] = {"measured": _memory.peak(step.name, "torch")}
    samples = measure(runs, args.repeats, args.seconds, threads=args.threads)
    for name, row in rows.items():
        row["ms"] = round(min(samples[name]) * 1e3, 2)
    for row in rows.values():
        row["memory"] = round(row["measured"] / rows["PyTorch"]["measured"], 3)
        row["time"] = round(row["ms"] / rows["PyTorch"]["ms"], 3)
    rows_measured = [{"step": step.name, "remat": name, **row} for name, row in rows.items()]
    for row in rows_measured:
        print(json.dumps(row), flush=True)
    return rows_measured


def _compiled(step, inputs, folder: Path):
    """Compile a step, write it with its arguments to a folder, and return a function that runs it
    on these arguments."""
    import numpy as np
    import tvm
    from tvm import relax

    import relax_grad
    from relax_grad.training._donation import donating

    # As the trainer does.
    module = donating(step)
    executable = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    executable.export_library(str(folder / "step.so"))
    scalars = [np.array(value, "float64") for value in step.hyperparameters.values()]
    single = [*(tensor.numpy() for tensor in inputs), *scalars, np.array(0, "int64")]
    groups = [[tensor.numpy() for tensor in group.values()] for group in step.initial()]
    arrays = {f"single/{i}": array for i, array in enumerate(single)}
    for name, group in zip(_GROUPS, groups, strict=True):
        arrays.update({f"{name}/{i}": array for i, array in enumerate(group)})
    np.savez(folder / "arrays.npz", **arrays)
    function = relax.VirtualMachine(executable, tvm.cpu())["step"]
    arguments = [tvm.runtime.tensor(array) for array in single]
    arguments += [[tvm.runtime.tensor(array) for array in group] for group in groups]
    return lambda: function(*arguments)  # the step writes to its arguments


def _growth(folder: Path) -> int:
    """Return the resident memory that steps add at most, each from the results of the previous
    one."""
    import _memory
    import numpy as np
    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.runtime.load_module(str(folder / "step.so")), tvm.cpu())
    with np.load(folder / "arrays.npz") as arrays:
        tensors = {name: tvm.runtime.tensor(arrays[name]) for name in arrays.files}

    def group(name):
        return [array for key, array in tensors.items() if key.startswith(f"{name}/")]

    single, groups = group("single"), [group(name) for name in _GROUPS]
    tensors.clear()

    def run() -> None:
        _loss, _metrics, _outputs, params, states, slots = machine["step"](*single, *groups)
        groups[:] = [list(params), groups[1], list(states), list(slots)]

    return _memory.growth(run, None)


def _parser() -> argparse.ArgumentParser:
    from _timing import add_options

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="a part of the name of the step")
    add_options(parser, "step", repeats=15, seconds=60.0)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="the folder of the results (default: benchmarks/results)",
    )
    parser.add_argument(
        "--plot", action="store_true", help="draw the figure of the results, and measure nothing"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
