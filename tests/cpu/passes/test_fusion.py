"""Blocks return the operands of opaque calls while FuseOps runs; the fused functions stay the same."""

from __future__ import annotations

import tvm
import tvm_ffi
from dispatched import HOST
from training_steps import convolutional
from tvm import relax

from relax_grad.cpu import stages
from relax_grad.cpu.passes.fusion import keep_operands, return_operands
from relax_grad.transform import DispatchKernels


def before_fusion():
    """Return a training step in its state right before FuseOps."""
    module = convolutional()[0]
    with HOST:
        for each in stages.passes(HOST, DispatchKernels(HOST)):
            if each.info.name == return_operands.info.name:
                return module
            module = each(module)
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
