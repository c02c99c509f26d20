"""Properties of the CPU, read from a target."""

from __future__ import annotations

import doctest
import platform

import pytest
import tvm
from machines import compile_kernels
from tvm import tirx
from tvm.target import codegen

import relax_grad
from relax_grad.cpu import target, tuning
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.target import CPU, check_convention
from relax_grad.cpu.tiles import Permission


@pytest.mark.parametrize(
    ("target", "lanes", "registers"),
    [
        ({"kind": "llvm"}, 4, 16),
        ({"kind": "llvm", "mcpu": "haswell"}, 8, 16),
        ({"kind": "llvm", "mcpu": "znver3"}, 8, 16),
        ({"kind": "llvm", "mcpu": "skylake-avx512"}, 16, 32),
        ({"kind": "llvm", "mcpu": "znver4"}, 16, 32),
        ({"kind": "llvm", "mcpu": "x86-64", "mattr": ["+avx2", "+fma"]}, 8, 16),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}, 4, 32),
    ],
)
def test_vectors_of_processors(target, lanes, registers):
    cpu = CPU.of(target)
    assert (cpu.lanes, cpu.registers) == (lanes, registers)


def test_cores(monkeypatch):
    assert CPU.of({"kind": "llvm", "num-cores": 7}).cores == 7
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    assert CPU.of("llvm").cores == 3
    monkeypatch.setenv("TVM_NUM_THREADS", "many")
    assert CPU.of("llvm").cores >= 1


@pytest.mark.parametrize("target", ["c", "webgpu"])
def test_targets_without_llvm_have_no_cpu(target):
    assert CPU.of(target) is None


def test_the_host_is_a_processor_with_vectors():
    host = relax_grad.target.host()
    assert isinstance(host, tvm.target.Target)
    assert CPU.of(host).lanes >= CPU.of("llvm").lanes
    assert CPU.of(host).cores >= 1


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("generic", False),
        ("cortex-a53", False),
        ("cortex-a55", True),
        ("cortex-a72", False),
        ("cortex-a76", True),
        ("cortex-a78", True),
        ("neoverse-n1", True),
        ("neoverse-n2", True),
        ("neoverse-v1", True),
        ("neoverse-v2", True),
        ("apple-m1", True),
    ],
)
def test_processors_of_arm(name, half):
    """All have the vectors of NEON, and some have arithmetic in float16."""
    target = relax_grad.target.arm(name, 6)
    assert CPU.of(target) == CPU(4, 32, 6)
    assert target.attrs["mtriple"] == "aarch64-linux-gnu"
    assert bool(codegen.target_has_features("fullfp16", target)) == half


def test_webassembly_has_vectors_of_128_bits_and_one_core():
    target = relax_grad.target.wasm()
    assert CPU.of(target) == CPU(4, 16, 1)
    assert codegen.target_has_features("simd128", target)
    assert not codegen.target_has_features("relaxed-simd", target)
    assert codegen.target_has_features("relaxed-simd", relax_grad.target.wasm(relaxed_simd=True))


@pytest.mark.parametrize(
    ("name", "feature", "lacks"),
    [
        ("cortex-m4", "vfp4d16sp", "fp64"),
        ("cortex-m7", "fp64", "mve"),
        ("cortex-m33", "fp-armv8d16sp", "fp64"),
        ("cortex-m52", "mve.fp", "neon"),
        ("cortex-m55", "mve.fp", "neon"),
        ("cortex-m85", "mve.fp", "neon"),
    ],
)
def test_microcontrollers_have_floating_point_units(name, feature, lacks):
    target = relax_grad.target.cortex_m(name)
    assert CPU.of(target) == CPU(4, 16, 1)
    assert codegen.target_has_features(feature, target)
    assert not codegen.target_has_features(lacks, target)
    check_convention(target)


def test_triples_without_an_environment_are_refused():
    wrong = {"kind": "llvm", "mtriple": "thumbv7em-none-eabihf", "mcpu": "cortex-m7"}
    with pytest.raises(ValueError, match="thumbv7em-unknown-none-eabihf, but it is thumbv7em-none"):
        check_convention(tvm.target.Target(wrong))
    for triple in ("aarch64-linux-gnu", "arm-linux-gnueabihf", "armv7a-none-linux-gnueabihf"):
        check_convention(tvm.target.Target({"kind": "llvm", "mtriple": triple}))


def test_riscv_has_doubles_in_registers():
    target = relax_grad.target.riscv64()
    assert codegen.target_has_features("d", target)
    assert target.attrs["mabi"] == "lp64d"


@pytest.mark.parametrize(
    ("level", "cpu"), [("v1", (4, 16)), ("v2", (4, 16)), ("v3", (8, 16)), ("v4", (16, 32))]
)
def test_levels_of_x86_64(level, cpu):
    found = CPU.of(relax_grad.target.x86_64(level, 3))
    assert found == CPU(*cpu, 3, tuning=tuning.ICE_LAKE if level == "v4" else None)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((name, "EARLY_AVX2") for name in ("haswell", "skylake")),
        *((name, "AVX2") for name in ("alderlake", "x86-64-v3", "bdver4", "znver1", "znver3")),
        *((name, "EARLY_AVX512") for name in ("skylake-avx512", "cascadelake", "cooperlake")),
        *((name, "ICE_LAKE") for name in ("icelake-server", "emeraldrapids", "x86-64-v4")),
        *((name, "ZEN4") for name in ("znver4", "znver5")),
        *((name, "GENERIC") for name in ("x86-64", "x86-64-v2", "nehalem")),
    ],
)
def test_families_of_processors(name, row):
    target = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": name}
    assert CPU.of(target).tuning is getattr(tuning, row)


@pytest.mark.parametrize("name", [None, "generic"])
def test_a_target_without_a_processor_has_no_generation(name):
    named = {} if name is None else {"mcpu": name}
    cpu = CPU.of({"kind": "llvm", "mattr": ["+avx2", "+fma"], "num-cores": 2, **named})
    assert cpu == CPU(8, 16, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: t.arm("cortex-a760"), "it is 'cortex-a760'; did you mean cortex-a76 or "),
        (lambda t: t.arm("haswell"), "name must be a processor of AArch64, but it is 'haswell'"),
        (lambda t: t.arm("x"), "but it is 'x'; there are "),
        (lambda t: t.arm("cortex-a76", 0), "num_cores must be a positive integer, but it is 0"),
        (lambda t: t.cortex_m("cortex-m3"), "one of cortex-m4, .* but it is 'cortex-m3'"),
        (lambda t: t.x86_64("v5"), "level must be one of v1, v2, v3, v4, but it is 'v5'"),
        (lambda t: t.x86_64("v3", -1), "num_cores must be a positive integer, but it is -1"),
    ],
)
def test_unknown_processors(make, message):
    with pytest.raises(ValueError, match=message):
        make(relax_grad.target)


def test_examples():
    assert doctest.testmod(relax_grad.cpu.target).failed == 0
    assert doctest.testmod(relax_grad.cpu.target).attempted > 0


@pytest.mark.parametrize(
    ("name", "flags", "answer", "wanted"),
    [
        ("rocketlake", "avx2 fma avx512f avx512_bf16 amx_tile amx_bf16", "GRANTED", (16, 1, 1)),
        ("rocketlake", "avx2 fma avx512f avx512_bf16 amx_tile amx_bf16", "REFUSED", (16, 0, 1)),
        ("rocketlake", "avx2 fma avx512f", "ABSENT", (16, 0, 0)),
        ("sapphirerapids", "avx2 fma avx512f", "ABSENT", (16, 0, 0)),
        ("znver4", "avx2 fma avx512f", "ABSENT", (16, 0, 0)),
        ("sapphirerapids", "avx2 fma", "ABSENT", (8, 0, 0)),
        ("znver4", "avx2 fma", "ABSENT", (8, 0, 0)),
        ("znver4", "", "ABSENT", (16, 0, 1)),  # not Linux
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for this machine: x86-64")
def test_the_host_is_what_linux_shows(monkeypatch, name, flags, answer, wanted):
    """A virtual machine may hide instructions of a model, or show an older one."""
    triple = "x86_64-unknown-linux-gnu"
    monkeypatch.setattr(target.codegen, "llvm_get_system_cpu", lambda: name)
    monkeypatch.setattr(target.codegen, "llvm_get_system_triple", lambda: triple)
    monkeypatch.setattr(target, "permission", lambda: Permission[answer])
    monkeypatch.setattr(target, "flags", lambda: frozenset(flags.split()))
    host = target.host()
    cpu = CPU.of(host)
    assert (cpu.lanes, cpu.tiles, cpu.rounds) == wanted
    text = compile_kernels({"f": doubled(64)}, host).inspect_source("asm")
    assert ("zmm" in text) == (cpu.lanes == 16)


def doubled(size: int) -> tirx.PrimFunc:
    """Return a function that doubles numbers, which LLVM computes in the widest vectors."""

    def body(a, c) -> None:
        with b.serial(0, size // 16) as i:
            at = tirx.Ramp(i * 16, 1, 16)
            b.store(c, at, a[at] + a[at])

    return b.prim_func("doubled", b.floats("ac", ([size], [size])), body)
