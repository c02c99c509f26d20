"""Properties of the CPU, read from a target."""

from __future__ import annotations

import doctest

import pytest
import tvm

import relax_grad
from relax_grad.cpu.target import CPU


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
def test_what_llvm_does_not_compile_for(target):
    assert CPU.of(target) is None


def test_the_host_is_a_processor_with_vectors():
    host = relax_grad.target.host()
    assert isinstance(host, tvm.target.Target)
    assert CPU.of(host).lanes >= CPU.of("llvm").lanes
    assert CPU.of(host).cores >= 1


def test_examples():
    assert doctest.testmod(relax_grad.cpu.target).failed == 0
    assert doctest.testmod(relax_grad.cpu.target).attempted > 0
