"""The CPUs that kernels are generated for, and how a kernel is run on this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.target import codegen

from relax_grad.testing._program import without_assertions

#: Targets of every vector width that x86 has, by name.
TARGETS = {
    "sse": {"kind": "llvm", "num-cores": 2},
    "avx2": {"kind": "llvm", "mcpu": "haswell", "num-cores": 2},
    "avx512": {"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2},
}


def runs_here(name: str) -> bool:
    """Tell whether this machine executes what is compiled for a target."""
    host = {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()}
    features = {"sse": ["sse2"], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512vl"]}[name]
    return bool(codegen.target_has_features(features, tvm.target.Target(host)))


def each_target(function):
    """Run a test, which takes ``target``, for each vector width that this machine has.

    The narrowest is left to the long sweeps, for the time that it takes.
    """
    params = [
        pytest.param(
            tvm.target.Target(target),
            id=name,
            marks=[
                pytest.mark.skipif(not runs_here(name), reason=f"this machine has no {name}"),
                *([pytest.mark.slow] if name == "sse" else []),
            ],
        )
        for name, target in TARGETS.items()
    ]
    return pytest.mark.parametrize("target", params)(function)


@dataclass(frozen=True)
class Run:
    """A kernel, the arrays that it takes, and the shapes of what it returns, all float32."""

    function: tirx.PrimFunc
    inputs: Sequence[np.ndarray]
    outputs: Sequence[tuple[int, ...]]


def run_kernels(runs: Sequence[Run], target: tvm.target.Target) -> list[list[np.ndarray]]:
    """Compile kernels together, run each, and return the results of each.

    A function that several runs have is compiled once. What a kernel does not write is NaN, and one that writes to an input fails.
    """
    names = {id(run.function): f"kernel{i}" for i, run in enumerate(runs)}
    module = tvm.IRModule(
        {
            names[id(run.function)]: run.function.with_attr(
                "global_symbol", names[id(run.function)]
            )
            for run in runs
        }
    )
    # What a kernel asserts of its arguments is half of its code, and of the time to compile it.
    with without_assertions():
        compiled = tvm.compile(module, target)
    found = []
    for run in runs:
        results = [np.full(shape, np.nan, "float32") for shape in run.outputs]
        tensors = [tvm.runtime.tensor(array) for array in (*run.inputs, *results)]
        compiled[names[id(run.function)]](*tensors)
        for array, tensor in zip(run.inputs, tensors, strict=False):
            assert array.tobytes() == tensor.numpy().tobytes(), "a kernel has written to its input"
        found.append([tensor.numpy() for tensor in tensors[len(run.inputs) :]])
    return found


def at(shape: Sequence, values: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with values for its symbolic extents."""
    return tuple(extent if isinstance(extent, int) else values[extent.name] for extent in shape)


def largest_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest error relative to the largest number, NaN counting as infinite."""
    error = np.abs(found - wanted) / max(1.0, np.abs(wanted).max(initial=0.0))
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))
