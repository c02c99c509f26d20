"""Blocks return the operands of opaque calls, and elements of tuples, while FuseOps runs."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from dispatched import HOST
from training_steps import convolutional
from tvm import relax

from relax_grad.cpu import stages
from relax_grad.cpu.passes.fusion import fuse_ops, keep_operands, return_operands
from relax_grad.transform import DispatchKernels


def before_fusion():
    """Return a training step in its state right before FuseOps."""
    module = convolutional()[0]
    with HOST:
        for transform in stages.passes(HOST, DispatchKernels(HOST)):
            if transform.info.name == return_operands.info.name:
                return module
            module = transform(module)
    raise AssertionError("the pipeline has no such pass")


def run(module, *passes):
    with HOST:
        return tvm.transform.Sequential(passes)(module)


def returned(module):
    return [
        binding.var
        for function in module.functions.values()
        if isinstance(function, relax.Function)
        for block in function.body.blocks
        if isinstance(block, relax.DataflowBlock)
        for binding in block.bindings
        if not isinstance(binding.var, relax.DataflowVar)
    ]


def test_the_same_is_fused():
    module = before_fusion()
    fusion = relax.transform.FuseOps(), relax.transform.FuseTIR()
    plain = run(module, *fusion)
    assert len(plain.functions) < len(module.functions)  # some functions are fused
    assert tvm_ffi.structural_equal(plain, run(module, return_operands, *fusion, keep_operands))


def test_operands_are_returned_for_a_while():
    module = before_fusion()
    changed = run(module, return_operands)
    assert len(returned(changed)) > len(returned(module))
    assert relax.analysis.check_well_formed(changed)
    assert tvm_ffi.structural_equal(run(changed, keep_operands), module)


def sum_of_tuples(counts):
    """Return a module that adds the given number of elements of the results of each normalisation,
    before FuseOps."""
    x = relax.Var("x", relax.TensorType((4, 5), "float32"))
    rows = [relax.const(np.full(5, value, "float32")) for value in (1.5, 0.5, 0.25, 2.0)]
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            total = x
            for count in counts:
                norm = builder.emit(relax.op.nn.batch_norm(x, *rows, axis=1))
                for index in range(count):
                    total = builder.emit(relax.op.add(total, builder.emit(norm[index])))
            result = builder.emit_output(total)
        builder.emit_func_output(result)
    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
    return tvm.transform.Sequential(passes)(builder.get())


@pytest.mark.parametrize(
    "counts",
    [[2] * 40, [1] * 20, [3] * 20, [1, 2, 3] * 10, [3]],
    ids=lambda counts: f"{len(counts)}-{counts[-1]}",
)
def test_a_function_of_many_tuples(counts):
    module = sum_of_tuples(counts)
    fused = run(module, fuse_ops)
    functions = [f for f in fused.functions.values() if isinstance(f, relax.Function)]
    assert len(functions) == 2  # all sums are one function
    assert not any(map(relax.analysis.free_vars, functions))
    x = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    result, wanted = (
        relax.VirtualMachine(tvm.compile(mod, HOST, **options), tvm.cpu())["main"](
            tvm.runtime.tensor(x)
        ).numpy()
        for mod, options in (
            (module, {"relax_pipeline": "relax_grad"}),
            (run(module, relax.transform.ToNonDataflow()), {}),
        )
    )
    np.testing.assert_allclose(result, wanted, 1e-5, 1e-5)
