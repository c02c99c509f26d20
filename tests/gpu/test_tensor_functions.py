"""The adjoints of tensor functions on a GPU: their kernels have threads, and agree with the CPU
when emulated."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compile_cuda import compile_for_cuda, leaves, missing
from tensor_accesses import Access
from tvm import relax

from relax_grad.autodiff import gradient
from relax_grad.testing import _program

#: Accesses whose adjoints are one map or sum for each argument, which dlight schedules.
PARALLEL = ["strides", "pad", "reshape", "repeat", "window", "sum", "matmul"]


@pytest.fixture(scope="module")
def programs():
    """Return the programs, their modules in one, and that one compiled for CUDA."""
    made, modules = [], []
    for name in PARALLEL:
        access = Access(name)
        inputs = [operand.astype("float32") for operand in access.inputs()]
        arguments = _program.make_arguments(inputs, None, {})
        program = _program.first_order(access, arguments, {}, np.random.default_rng(0))
        with pytest.MonkeyPatch.context() as patch:  # a product would become an operator
            patch.setattr(gradient, "with_operators", lambda mod: mod)
            module = _program.differentiate(program, [f"x{i}" for i in range(len(inputs))])
        del module["main"]
        made.append(program)
        modules.append(module)
    module = _program.merge(modules)
    return made, module, compile_for_cuda(module)


def test_every_kernel_has_threads(programs):
    compiled = programs[-1]
    assert compiled.launches
    assert compiled.on_host == []
    assert compiled.serial == []


@pytest.mark.skipif(
    missing("g++") is not None, reason=f"{missing('g++')}: the kernels are not emulated"
)
def test_emulated_kernels_agree_with_the_cpu(programs):
    made, module, compiled = programs
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    with compiled.emulate() as emulation:
        for number, program in enumerate(made, start=1):
            name = f"main_{number}_adjoint"
            results = emulation.run(name, program.values())
            wanted = leaves(machine[name](*map(tvm.runtime.tensor, program.values())))
            for own, expected in zip(results, wanted, strict=True):
                np.testing.assert_allclose(own, expected, 1e-4, 1e-4, err_msg=PARALLEL[number - 1])
