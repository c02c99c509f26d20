"""Functions that the kernels of a program share."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from machines import compile_kernels
from tvm import relax
from tvm.target import Target

import relax_grad
from relax_grad.cpu import squares
from relax_grad.cpu.codegen import lower
from relax_grad.cpu.codegen.common import _with_attributes, without_definitions
from relax_grad.cpu.codegen.compile import _template
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.target import CPU


def transposed(cpu: CPU):
    """Return a kernel that copies its second factor transposed."""
    return matmul(Matmul(33, 50, 70, transpose_b=True), cpu)


@pytest.mark.parametrize(("processor", "lanes"), [("haswell", 8), ("skylake-avx512", 16)])
def test_a_program_has_one_definition(processor, lanes, tmp_path):
    """Two kernels call the function; their results are those of kernels that contain it."""
    target = Target({"kind": "llvm", "mcpu": processor})
    kernel = transposed(CPU.of(target))
    name = f"{squares.NAME}{lanes}"
    whole, called = kernel.script(), without_definitions(kernel).script()
    assert name in whole
    assert name in called
    assert "pragma_import_llvm" in whole
    assert "pragma_import_llvm" not in called

    x = relax.Var("x", relax.TensorType((33, 70), "float32"))
    w = relax.Var("w", relax.TensorType((50, 70), "float32"))
    v = relax.Var("v", relax.TensorType((40, 70), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, w, v]):
        with bb.dataflow():
            products = [
                bb.emit(relax.op.matmul(x, relax.op.permute_dims(factor))) for factor in (w, v)
            ]
            result = bb.emit_output(relax.Tuple(products))
        bb.emit_func_output(result)
    with relax_grad.cache(tmp_path):  # without one, TVM compiles a few kernels
        executable = tvm.compile(bb.get(), target, relax_pipeline="relax_grad")
    text = "".join(
        library.inspect_source("ll") for library in executable.mod.imports if library.kind == "llvm"
    )
    assert text.count(f'module asm "{name}:"') == 1

    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(shape).astype("float32") for shape in ((33, 70), (50, 70), (40, 70))
    ]
    machine = relax.VirtualMachine(executable, tvm.cpu())
    first, second = machine["main"](*map(tvm.runtime.tensor, arrays))
    alone = tvm.runtime.empty((33, 50), "float32")
    compile_kernels({"kernel": kernel}, target)["kernel"](
        *map(tvm.runtime.tensor, arrays[:2]), alone
    )
    assert first.numpy().tobytes() == alone.numpy().tobytes()
    np.testing.assert_allclose(second.numpy(), arrays[0] @ arrays[2].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512", "znver4"])
def test_the_definition_is_for_the_processor(processor):
    """Without the attributes, LLVM would divide the vectors into those of SSE."""
    target = lower.with_whole_vectors(lower.optimizing(Target({"kind": "llvm", "mcpu": processor})))
    lanes = CPU.of(target).lanes
    text = _with_attributes(squares.definition(lanes), _template(target))
    assert f'"target-cpu"="{processor}"' in text
    assert "alwaysinline" not in text
    assert ('"target-features"="-prefer-256-bit"' in text) == (processor == "skylake-avx512")
