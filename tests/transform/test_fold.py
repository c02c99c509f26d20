"""Constants that are computed while compiling."""

from __future__ import annotations

import numpy as np
import tvm
from dispatched import run_both
from programs import build, is_sound, tensor
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.transform import FoldConstants


def folded(module):
    legal = relax.transform.LegalizeOps()(module)
    result = FoldConstants()(legal)
    assert relax.analysis.check_well_formed(result)
    return legal, result


def calls_in(module):
    (block,) = module["main"].body.blocks
    return len([binding for binding in block.bindings if isinstance(binding.value, relax.Call)])


def check(body, left: int, shape=(4, 3)):
    """Fold what a body makes of a tensor: as many calls are left, and TVM's pass folds the same."""
    module = build([tensor("x", shape, "float32")], body)
    legal, result = folded(module)
    is_sound(module)
    assert calls_in(result) == left
    names = {variable.name_hint: variable for variable in legal.get_global_vars()}
    assert names.keys() == {variable.name_hint for variable in result.get_global_vars()}
    theirs = relax.transform.FoldConstant()(legal)
    tvm.ir.assert_structural_equal(result["main"], theirs["main"])
    values = [np.random.default_rng(0).normal(size=(4, 3)).astype("float32")]
    for found, wanted in zip(*run_both(module, "main", values), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_chains():
    def body(bb, x):
        ones = bb.emit(op.ones((3,), "float32"))
        places = bb.emit(op.astype(bb.emit(op.arange(0, 3, 1, "int64")), "float32"))
        half = bb.emit(relax.const(0.5, "float32"))
        scaled = bb.emit(op.multiply(bb.emit(op.add(places, ones)), half))
        return op.multiply(x, scaled)

    check(body, 1)


def test_what_is_returned():
    check(lambda bb, x: relax.Tuple([bb.emit(op.exp(x)), bb.emit(op.zeros((4, 3), "float32"))]), 1)


def test_large_tensors_are_made_at_run_time():
    check(lambda bb, x: op.add(x, bb.emit(op.sum(bb.emit(op.ones((2000,), "float32"))))), 3)


def test_symbolic_shapes_stay():
    n = tirx.Var("n", "int64")
    check(lambda bb, x: op.add(x, bb.emit(op.zeros((n, 3), "float32"))), 2, (n, 3))


def test_modules_without_constants_stay():
    module = build([tensor("x", (3,), "float32")], lambda bb, x: bb.emit(op.exp(x)))
    legal, result = folded(module)
    tvm.ir.assert_structural_equal(result, legal)
