"""Kernels of every family run on AArch64 with the results of x86."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import arm
import numpy as np
import pytest
import tvm
from arm_programs import adjoints, losses, updates
from kernel_cases import cases
from kernel_cases.case import KernelCall, KernelCase, kernel_of
from sweep import share

import relax_grad
import relax_grad.cpu.kernel
from relax_grad.cpu.dispatch import operators_with_kernels
from relax_grad.testing._program import without_assertions

#: The batch of static and of symbolic kernels.
BATCH = 3

#: The largest differences, relative to max(1, the largest number). Sums have another order for
#: vectors of another width, so that results in half precision may be rounded to the next number.
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}

#: Parts of the names of the operators half of whose cases run in the default suite.
WHOLE = "attention", "lstm", "gru", "rnn", "recurrent", "quantized"


FOLDER = Path(relax_grad.cpu.kernel.__file__).parent
#: The modules of kernels, without those for instructions that only processors of x86 have, and
#: for products whose factors change places, which is measured on processors of x86 only, and the
#: text of plans.
MODULES = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*.py")} - {
    *(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/__init__.py")),
    *("conv/_amx_lines.py", "conv/_pairs.py", "conv/_tiles_plan.py", "conv/tiles.py"),
    *("conv/weight_tiles.py", "attention/_pair_copies.py", "language/plans.py"),
    *("language/_amx_code.py", "matmul/_amx_products.py", "matmul/tiled.py", "matmul/_turned.py"),
    "language/turned.py",  # squares of 8 and of 16
}


def modules_that_run(run: Callable[[], object]) -> set[str]:
    """Return the paths of the modules of kernels with a function that ``run`` calls."""
    modules: set[str] = set()
    start = f"{FOLDER}{os.sep}"

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(start):
            modules.add(path.removeprefix(start).replace(os.sep, "/"))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return modules


def choice() -> tuple[list[KernelCase], set[str]]:
    """Return cases of each operator and of each module of kernels, and the modules."""
    target = relax_grad.target.arm("cortex-a72")
    chosen, operators, modules = [], set(), set()
    for case in cases():
        used = modules_that_run(lambda case=case: kernel_of(case, target, BATCH))
        if case.op not in operators or not used <= modules:
            chosen.append(case)
            operators.add(case.op)
            modules |= used
    return chosen, modules


def arrays_of(call: KernelCall) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the arguments of a kernel, and arrays for its results that hold other numbers."""
    inputs, outputs = call.at(BATCH)
    rng = np.random.default_rng(zlib.crc32(call.case.name.encode()))
    arguments = [
        rng.normal(size=shape).astype(dtype)
        if "float" in dtype
        else rng.integers(-5, 5, shape).astype(dtype)
        for shape, dtype in inputs
    ]
    results = [
        np.full(shape, np.nan if "float" in dtype else 77, dtype) for shape, dtype in outputs
    ]
    return arguments, results


def library_of(calls: Sequence[KernelCall], target, path: Path, **options) -> Path:
    functions = {
        f"kernel{i}": call.function.with_attr("global_symbol", f"kernel{i}")
        for i, call in enumerate(calls)
    }
    with without_assertions():
        tvm.compile(tvm.IRModule(functions), target).export_library(str(path), **options)
    return path


def differences(
    chosen: Sequence[KernelCase], name: str, cpu: str, programs, folder, dtype: str = "float32"
) -> list[str]:
    """Return the cases whose results on a processor differ from those here.

    They are alternately static and symbolic, with floats of a dtype.
    """
    target, here = relax_grad.target.arm(name), relax_grad.target.host()
    batches = [BATCH if i % 2 else None for i in range(len(chosen))]
    pairs = list(zip(chosen, batches, strict=True))
    there = [kernel_of(case, target, batch, dtype) for case, batch in pairs]
    own = [kernel_of(case, here, batch, dtype) for case, batch in pairs]
    arrays = {f"kernel{i}": arrays_of(call) for i, call in enumerate(there)}
    library = library_of(there, target, folder / "there.so", cc=arm.COMPILER)
    results_of = arm.call(
        programs,
        library,
        {name: arguments for name, (arguments, _) in arrays.items()},
        {name: results for name, (_, results) in arrays.items()},
        cpu,
    )
    module = tvm.runtime.load_module(str(library_of(own, here, folder / "here.so")))
    faults = []
    for case, (name, (arguments, results)) in zip(chosen, arrays.items(), strict=True):
        tensors = [tvm.runtime.tensor(array) for array in (*arguments, *results)]
        module[name](*tensors)
        wanted = [tensor.numpy() for tensor in tensors[len(arguments) :]]
        error = max(map(arm.difference, results_of[name], wanted), default=np.inf)
        if error > TOLERANCES[dtype]:
            faults.append(f"{case.name}: {error}")
    return faults


def test_every_family(programs, tmp_path):
    """Each operator and each module of kernels, on a processor with the baseline's instructions and
    NEON alone."""
    chosen, _ = choice()
    assert differences(chosen, "cortex-a72", "cortex-a72", programs, tmp_path) == []


def test_attention_and_recurrences(programs, tmp_path):
    """Half of the cases of attention, recurrences and quantised products, of each operator some."""
    chosen = [case for case in cases() if any(part in case.op for part in WHOLE)][::2]
    assert differences(chosen, "cortex-a76", "cortex-a76", programs, tmp_path) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype, programs, tmp_path):
    """Each operator whose kernels take half precision; widened in registers on this processor."""
    chosen = {case.op: case for case in cases() if case.takes(dtype)}.values()
    faults = differences(list(chosen), "cortex-a72", "cortex-a72", programs, tmp_path, dtype)
    assert faults == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "cpu"),
    [("cortex-a53", "cortex-a53"), ("cortex-a76", "cortex-a76"), ("neoverse-n2", "max")],
)
def test_all_kernels_in_half_precision(name, cpu, dtype, programs, tmp_path):
    chosen = [case for case in share(cases()) if case.takes(dtype)]
    assert differences(chosen, name, cpu, programs, tmp_path, dtype) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cpu"),
    [("cortex-a53", "cortex-a53"), ("cortex-a76", "cortex-a76"), ("neoverse-n2", "max")],
)
def test_all_kernels(name, cpu, programs, tmp_path):
    assert differences(share(cases()), name, cpu, programs, tmp_path) == []


def test_every_family_has_a_case():
    chosen, modules = choice()
    assert sorted({case.op for case in chosen}) == operators_with_kernels()
    # test_programs.py runs these programs.
    target = relax_grad.target.arm("cortex-a72")
    programs = {**losses(), **updates(), **adjoints("float32", ["relax.nn.gelu"])}
    for module, _ in programs.values():
        modules |= modules_that_run(lambda module=module: relax_grad.pipeline(target)(module))
    assert modules == MODULES, "add a case to tests/support/kernel_cases/ or arm_programs.py"
