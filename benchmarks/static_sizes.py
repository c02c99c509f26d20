"""Sizes of training steps without a runtime, for docs/without_runtime.md.

Networks are exported for processors, and their C sources compiled by the cross compilers (``make
cross-tools``) and by clang (``make web-tools``). The figures are the bytes of code and tables, the
state, the arena and the workspace. Nothing runs.
"""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import _small_models as models
import tvm
from _benchmark import Benchmark, facts, named
from _small_models import Small, cross_entropy

import relax_grad
from relax_grad.frontend.torch import from_module
from relax_grad.training import SGD, AdamW, Trainer, TrainStep, lora, train_step

#: The targets by the names on the page, with the compiler of the C sources.
TARGETS = {
    "x86-64-v2": (relax_grad.target.x86_64("v2", 1), ["cc"]),
    "Cortex-A53": (relax_grad.target.arm("cortex-a53", 1), ["aarch64-linux-gnu-gcc"]),
    "Cortex-M55": (
        relax_grad.target.cortex_m("cortex-m55"),
        ["arm-none-eabi-gcc", "-mcpu=cortex-m55", "-mthumb", "-mfloat-abi=hard"],
    ),
    "RISC-V": (relax_grad.target.riscv64(), ["riscv64-linux-gnu-gcc"]),
    "WebAssembly": (relax_grad.target.wasm(), []),
}

#: The bits of flags of a section that is in memory, and of its type without bytes in the file.
_ALLOCATED, _NO_BYTES = 2, 8


def digits() -> TrainStep:
    """The CNN of examples/digits_trainer.py as that program trains it."""
    return _step(_model(models.digits, (32, 1, 8, 8), 10), AdamW(3e-3, weight_decay=0.01), ema=0.98)


def keywords(**options: object) -> TrainStep:
    """A keyword-spotting CNN."""
    return _step(_model(models.keywords, (8, 1, 49, 10), 12), SGD(0.05, momentum=0.9), **options)


def adapted() -> TrainStep:
    """Low-rank adapters on a transformer with 4 layers of 128."""
    model = _model(lambda: models.Transformer(96, 32, 128, 4, 4), (4, 32), 96, 96)
    targets = ["*.query.weight", "*.value.weight"]
    return train_step(lora(_imported(model), rank=4, targets=targets), AdamW(1e-3))


def _model(network: Callable, shape: tuple[int, ...], classes: int, tokens: int = 0) -> Small:
    return Small("", "", network, shape, classes, tokens)


def _imported(model: Small, **options: object):
    inputs, targets = model.batch()
    return from_module(model.made(), (inputs,), loss=cross_entropy, targets=(targets,), **options)


def _step(model: Small, optimizer, ema: float | None = None, **options: object) -> TrainStep:
    return train_step(_imported(model, **options), optimizer, **({"ema": ema} if ema else {}))


NETWORKS: dict[str, Callable[[], TrainStep]] = {
    "digits CNN, batch 32, AdamW, moving average": digits,
    "keyword-spotting CNN (DS-CNN), batch 8, SGD with momentum": keywords,
    "the same, its last layer only": lambda: keywords(trainable="29.*", batch_norm="frozen"),
    "transformer, 4 layers of 128, low-rank adapters, batch 4 of 32 tokens": adapted,
}


def measured(make: Callable[[], TrainStep], args: Namespace) -> dict[str, dict[str, int]]:
    """Return the bytes of a step for each target."""
    trainer = Trainer(make())
    return {name: _sizes(trainer, *TARGETS[name]) for name in TARGETS}


def _sizes(trainer: Trainer, target: tvm.target.Target, compiler: list[str]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "step")
        trainer.export(folder, runtime="none", target=target)
        memory = json.loads((folder / "manifest.json").read_text())["memory"]
        if compiler:
            flags = ["-std=c99", "-Os", "-ffunction-sections", "-c"]
            sources = sorted(folder.glob("*.c"))
            subprocess.run([*compiler, *flags, *sources], cwd=folder, check=True)
            code = {"code": sum(loaded_bytes(path) for path in folder.glob("*.o"))}
            code["kernels"] = loaded_bytes(folder / "kernels.o")
        else:
            module = (folder / "step.wasm").read_bytes()
            code = {"code": len(module), "gzip": len(gzip.compress(module, 9))}
    return code | memory


def loaded_bytes(path: Path) -> int:
    """Return the bytes of an object file's sections that a program loads: code, tables and
    constants."""
    data = path.read_bytes()
    is_wide = data[4] == 2
    (table,) = struct.unpack_from("<Q" if is_wide else "<I", data, 40 if is_wide else 32)
    width, count = struct.unpack_from("<HH", data, 58 if is_wide else 46)
    # The type, the flags and the size of a section.
    form = "<4xIQ16xQ" if is_wide else "<4xII8xI"
    sections = (struct.unpack_from(form, data, table + i * width) for i in range(count))
    return sum(size for kind, flags, size in sections if flags & _ALLOCATED and kind != _NO_BYTES)


BENCHMARK = Benchmark(
    rows=lambda args: NETWORKS,
    measure=measured,
    json="static_sizes.json",
    head=lambda args: {
        **facts("tvm"),
        "libtvm_runtime": (Path(tvm.__file__).parent / "lib/libtvm_runtime.so").stat().st_size,
    },
    layout=named("steps"),
)
