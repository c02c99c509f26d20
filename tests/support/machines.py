"""The CPUs that kernels are generated for, and helpers to run kernels on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.target import codegen
from versions import IS_OLDEST

from relax_grad.cpu.codegen import lower
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import EARLY_AVX512, ICE_LAKE, ZEN4, Tuning
from relax_grad.testing._program import without_assertions

_AVX512 = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}

#: A target for each vector width of x86, for each maker of AVX-512, and for Intel's processors
#: before Ice Lake, by name.
TARGETS = {
    "sse": {"kind": "llvm", "num-cores": 2},
    "avx2-haswell": {"kind": "llvm", "mcpu": "haswell", "num-cores": 2},
    "avx2": {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2},
    # LLVM prefers shorter vectors on Intel's processors alone.
    "avx512-amd": {**_AVX512, "mattr": ["-prefer-256-bit"]},
    "avx512-skylake": {**_AVX512, "mcpu": "skylake-avx512"},
    "avx512": _AVX512,
}

#: A target that multiplies pairs of bfloat16.
PAIRS = {"avx512bf16": {"kind": "llvm", "mcpu": "znver4", "num-cores": 2}}

#: A target that multiplies tiles of bfloat16: with the unit of processors that have it, on others
#: with vectors, in the same order.
TILES = {"amx": {**_AVX512, "mattr": ["+amx-tile", "+amx-bf16"]}}

#: The names of the targets that multiply bfloat16, as parameters of tests.
HALVES = [*PAIRS, *TILES]


def runs_here(name: str) -> bool:
    """Tell whether this machine can execute code compiled for a target."""
    host = {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()}
    features = {
        "sse": ["sse2"],
        "avx2-haswell": ["avx2", "fma"],
        "avx2": ["avx2", "fma"],
        "avx512-amd": ["avx512f", "avx512vl"],
        "avx512-skylake": ["avx512f", "avx512vl"],
        "avx512": ["avx512f", "avx512vl"],
        "avx512bf16": ["avx512f", "avx512vl", "avx512vnni", "avx512bf16"],
        "amx": ["avx512f", "avx512vl"],
    }[name]
    return bool(codegen.target_has_features(features, tvm.target.Target(host)))


def of_halves(name: str):
    """Return the target of one of :data:`HALVES`; skip the test if this machine cannot run it."""
    if not runs_here(name):
        pytest.skip(f"this machine has no {name if name in PAIRS else 'AVX-512'}")
    return tvm.target.Target((PAIRS | TILES)[name])


#: The target with the widest vectors of this machine; None for another kind of processor.
WIDEST = next((name for name in reversed(TARGETS) if runs_here(name)), None)


def each_target(function):
    """Run a test with a ``target`` parameter for each vector width that this machine supports.

    Only the widest one runs outside of the long sweeps, to save time.
    """
    params = [
        pytest.param(
            tvm.target.Target(target),
            id=name,
            marks=[
                pytest.mark.skipif(not runs_here(name), reason=f"this machine has no {name}"),
                *([pytest.mark.slow] if name != WIDEST else []),
            ],
        )
        for name, target in TARGETS.items()
    ]
    return pytest.mark.parametrize("target", params)(function)


def cpu_of(row: Tuning, cores: int = 2, **properties: bool) -> CPU:
    """Return the properties of a processor with the values of a row."""
    return CPU(row.lanes, row.registers, cores, tuning=row, **properties)


def makers(cpu: CPU) -> list[CPU]:
    """Return the properties of the processors that execute code for a target: of any processor with
    AVX-512, those of its makers and generations, whose tiles and copies differ.

    The default suite takes them in turn; the long sweeps have a target for each.
    """
    if cpu.tuning is not ICE_LAKE:
        return [cpu]
    return [replace(cpu, tuning=tuning) for tuning in (ICE_LAKE, EARLY_AVX512, ZEN4)]


@dataclass(frozen=True)
class Run:
    """A kernel, its input arrays, and the shapes of its outputs, all float32."""

    function: tirx.PrimFunc
    inputs: Sequence[np.ndarray]
    outputs: Sequence[tuple[int, ...]]


def run_kernels(runs: Sequence[Run], target: tvm.target.Target) -> list[list[np.ndarray]]:
    """Compile kernels together, run each, and return the results of each.

    A function that several runs share is compiled once. Elements that a kernel does not write are
    NaN. A kernel that writes to an input fails.
    """
    names = {id(run.function): f"kernel{i}" for i, run in enumerate(runs)}
    compiled = compile_kernels({names[id(run.function)]: run.function for run in runs}, target)
    outputs = []
    for run in runs:
        results = [np.full(shape, np.nan, "float32") for shape in run.outputs]
        tensors = [tvm.runtime.tensor(array) for array in (*run.inputs, *results)]
        compiled[names[id(run.function)]](*tensors)
        for array, tensor in zip(run.inputs, tensors, strict=False):
            assert array.tobytes() == tensor.numpy().tobytes(), "a kernel has written to its input"
        outputs.append([tensor.numpy() for tensor in tensors[len(run.inputs) :]])
    return outputs


def compile_kernels(
    functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target | Mapping
) -> tvm.runtime.Module:
    """Compile kernels together as the pipeline does, without assertions, which are half of a
    kernel's code.

    TVM's default pipeline takes five times as long for a kernel, and LLVM's ``-O3`` a third longer.
    The test is skipped where TVM 0.26 loses a variable as it hoists a condition out of a loop.
    """
    try:
        with without_assertions():
            return lower.library(functions, lower.optimizing(tvm.target.Target(target)))
    except tvm.error.InternalError as error:
        if IS_OLDEST and "cannot find variable" in str(error):
            pytest.skip("TVM 0.26 loses a variable of a hoisted condition (docs/limits.md)")
        raise


def at(shape: Sequence, values: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with the given values for its symbolic extents."""
    return tuple(extent if isinstance(extent, int) else values[extent.name] for extent in shape)


def largest_error(actual: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest error relative to max(1, the largest wanted number); NaN counts as
    infinite."""
    error = np.abs(actual - wanted) / max(1.0, np.abs(wanted).max(initial=0.0))
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))
