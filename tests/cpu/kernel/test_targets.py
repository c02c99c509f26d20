"""Kernels of every operator compile for processors other than this one; they do not run here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from kernel_cases import cases
from kernel_cases.case import kernel_of
from machines import compile_kernels
from sweep import share
from tvm.target import codegen

import relax_grad
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import EARLY_AVX2, EARLY_AVX512, ICE_LAKE

ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
INTEL, SKYLAKE = (CPU(16, 32, 1, tuning=row) for row in (ICE_LAKE, EARLY_AVX512))
HASWELL = CPU(8, 16, 64, tuning=EARLY_AVX2)
TARGETS = {
    "Cortex-A76": ({**ARM, "mcpu": "cortex-a76", "num-cores": 4}, CPU(4, 32, 4), "fmla"),
    "Neoverse N1": ({**ARM, "mcpu": "neoverse-n1", "num-cores": 64}, CPU(4, 32, 64), "fmla"),
    "Apple M1": (
        {"kind": "llvm", "mtriple": "arm64-apple-macos", "mcpu": "apple-m1", "num-cores": 8},
        CPU(4, 32, 8),
        "fmla",
    ),
    "SSE": ({**X86, "num-cores": 1}, CPU(4, 16, 1), "mulps"),
    "AVX2": ({**X86, "mcpu": "haswell", "num-cores": 64}, HASWELL, "%ymm"),
    "AVX-512": ({**X86, "mcpu": "skylake-avx512", "num-cores": 1}, SKYLAKE, "%zmm"),
    "x86-64-v3": (dict(relax_grad.target.x86_64("v3").export()), CPU(8, 16, 8), "%ymm"),
    "x86-64-v4": (dict(relax_grad.target.x86_64("v4").export()), replace(INTEL, cores=8), "%zmm"),
    "AVX-512 of 64 cores": (
        {**X86, "mcpu": "skylake-avx512", "num-cores": 64},
        replace(SKYLAKE, cores=64),
        "%zmm",
    ),
}

#: The step between the cases that the default suite compiles for a target.
SOME = 31


def compile_cases(name, chosen):
    """Return the compiled module of cases, alternately symbolic and static."""
    settings, cpu, _ = TARGETS[name]
    architecture = "aarch64" if settings["mtriple"].startswith("a") else "x86_64"
    # On macOS, LLVM calls it arm64.
    if architecture not in str(codegen.llvm_get_targets()).replace("x86-64", "x86_64"):
        pytest.skip(f"LLVM is without {architecture}")
    target = tvm.target.Target(settings)
    assert CPU.of(target) == cpu
    functions = {}
    for i, case in enumerate(chosen):
        call = kernel_of(case, target, 3 if i % 2 else None)
        functions[f"kernel{i}"] = call.function
    return compile_kernels(functions, target)


@pytest.mark.parametrize("name", ["Cortex-A76", "SSE", "x86-64-v3", "x86-64-v4"])
def test_some_kernels(name, tmp_path):
    module = compile_cases(name, cases()[::SOME])
    assert TARGETS[name][2] in module.inspect_source("asm")
    path = tmp_path / "kernels.o"
    module.write_to_file(str(path), "o")
    assert path.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_all_kernels(name):
    chosen = share(cases()[::-1])  # others than of the test above
    assert TARGETS[name][2] in compile_cases(name, chosen).inspect_source("asm")
