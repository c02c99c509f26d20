"""Programs of every operator run on AArch64 with the results of x86: values, gradients, random
numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import arm
import numpy as np
import pytest
import tvm
from arm_programs import Case, adjoints, losses, random_numbers, updates
from programs import flat
from sweep import share
from training_steps import convolutional, transformer
from tvm import relax

import relax_grad
from relax_grad.testing import _program
from relax_grad.testing.samples import sampled_operators

#: The largest difference, relative to max(1, the largest number).
TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}


def differences(
    cases: Mapping[str, Case], target, cpu: str, programs: Path, folder: Path, dtype="float32"
) -> dict[str, float]:
    """Return the differences between the results on a processor and those here that are above the
    tolerance."""
    merged = _program.merge([module for module, _ in cases.values()])
    arguments = {}
    for number, (module, values) in enumerate(cases.values(), start=1):
        names = [v.name_hint for v in module.functions if v.name_hint in ("main", "main_adjoint")]
        for name in names:
            arguments[f"main_{number}{name.removeprefix('main')}"] = values

    def compiled(target):
        return tvm.compile(merged, target, relax_pipeline="relax_grad")

    library = folder / "program.so"
    compiled(target).export_library(str(library), cc=arm.COMPILER)
    results = arm.call(programs, library, arguments, {}, cpu)
    run = _machine(compiled(relax_grad.target.host()))
    faults = {}
    for name, values in arguments.items():
        wanted = flat(run(name, values))
        errors = [arm.difference(*pair) for pair in zip(results[name], wanted, strict=True)]
        if max(errors) > TOLERANCES[dtype]:
            case = list(cases)[int(name.split("_")[1]) - 1]
            faults[f"{case}: {name}"] = max(errors)
    return faults


def _machine(executable):
    machine = relax.VirtualMachine(executable, tvm.cpu())

    def run(name, values):
        tensors = [
            tvm.runtime.empty(value.shape, value.dtype.name).copyfrom(np.asarray(value))
            for value in values
        ]
        return _program.to_numpy(machine[name](*tensors))

    return run


def test_every_second_operator(programs, tmp_path):
    cases = {**adjoints("float32", sampled_operators()[::2]), **losses(), **updates()}
    target = relax_grad.target.arm("cortex-a76")
    assert differences(cases, target, "cortex-a76", programs, tmp_path) == {}


def test_networks(programs, tmp_path):
    """The losses and gradients of a residual network and of a transformer, through kernels of
    larger shapes."""
    cases = {"convolutional": convolutional(), "transformer": transformer()}
    target = relax_grad.target.arm("cortex-a72")
    assert differences(cases, target, "cortex-a72", programs, tmp_path) == {}


def test_random_numbers(programs, tmp_path):
    """Integers and booleans have the same bits."""
    target = relax_grad.target.arm("cortex-a53")
    assert differences(random_numbers(), target, "cortex-a53", programs, tmp_path) == {}


@pytest.mark.slow
def test_first_sample_of_every_operator(programs, tmp_path):
    target = relax_grad.target.arm("cortex-a76")
    assert differences(adjoints("float32"), target, "cortex-a76", programs, tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_samples(part, programs, tmp_path):
    every = list(adjoints("float32", most=1000).items())[part::4]
    cases = dict(share(every))
    target = relax_grad.target.arm("neoverse-n2")
    assert differences(cases, target, "max", programs, tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cortex-a53", "cortex-a76"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_precisions(dtype, name, programs, tmp_path):
    """Half precision with and without arithmetic of the processor, and double precision."""
    target = relax_grad.target.arm(name)
    assert differences(adjoints(dtype), target, name, programs, tmp_path, dtype) == {}


def test_half_precision(programs, tmp_path):
    """A few operators in half precision."""
    operators = ["matmul", "nn.conv2d", "nn.softmax", "exp", "sum", "nn.layer_norm", "take", "erf"]
    for dtype in ("float16", "bfloat16"):
        cases = adjoints(dtype, [f"relax.{operator}" for operator in operators])
        target = relax_grad.target.arm("cortex-a76")
        assert differences(cases, target, "cortex-a76", programs, tmp_path, dtype) == {}
