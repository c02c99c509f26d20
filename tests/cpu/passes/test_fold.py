"""Constant folding at compile time."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
import tvm
from dispatched import run_both
from programs import build, is_sound, tensor, with_assertions
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import from_source

from relax_grad.ir.compat import constant_value
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
    """Fold a function of a tensor; assert the number of calls left, and that TVM's pass folds the
    same."""
    module = build([tensor("x", shape, "float32")], body)
    legal, result = folded(module)
    is_sound(module)
    assert calls_in(result) == left
    names = {variable.name_hint: variable for variable in legal.get_global_vars()}
    assert names.keys() == {variable.name_hint for variable in result.get_global_vars()}
    theirs = relax.transform.FoldConstant()(legal)
    tvm.ir.assert_structural_equal(result["main"], theirs["main"])
    values = [np.random.default_rng(0).normal(size=(4, 3)).astype("float32")]
    for own, wanted in zip(*run_both(module, "main", values), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-6)


def test_chains():
    def body(bb, x):
        ones = bb.emit(op.ones((3,), "float32"))
        places = bb.emit(op.astype(bb.emit(op.arange(0, 3, 1, "int64")), "float32"))
        half = bb.emit(relax.const(0.5, "float32"))
        scaled = bb.emit(op.multiply(bb.emit(op.add(places, ones)), half))
        return op.multiply(x, scaled)

    check(body, 1)


def test_returned_constants_are_folded():
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


def filled(stores: str) -> tvm.IRModule:
    """Return a module that adds four numbers, stored by the given statements, to its parameter."""
    source = f"""
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def make(out: T.Buffer((T.int64(4),), "float32")):
        T.func_attr({{"tirx.noalias": True}})
{textwrap.indent(textwrap.dedent(stores), " " * 8)}
    @R.function
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        cls = Module
        with R.dataflow():
            made = R.call_tir(cls.make, R.tuple(), out_ty=R.Tensor((4,), "float32"))
            result = R.add(x, made)
            R.output(result)
        return result
"""
    return from_source(source)


@pytest.mark.parametrize(
    ("stores", "wanted"),
    [
        ("for i in range(4):\n    out[i] = T.float32(0.1)", [0.1] * 4),
        ("for i in range(4):\n    out[i] = T.float32(2)\nout[1] = T.float32(3)", [2, 3, 2, 2]),
        ("for i in range(4):\n    out[i] = T.Cast('float32', i)", [0, 1, 2, 3]),
        ("for i in range(4):\n    if i < 4:\n        out[i] = T.float32(5)", [5] * 4),
    ],
    ids=["constant", "two", "index", "condition"],
)
def test_functions_of_statements(stores, wanted):
    result = FoldConstants()(filled(stores))
    (constant,) = (
        constant_value(argument)
        for block in result["main"].body.blocks
        for binding in block.bindings
        for argument in binding.value.args
        if constant_value(argument) is not None
    )
    np.testing.assert_array_equal(constant, np.array(wanted, "float32"))


def test_a_fill_of_another_shape():
    """The pass refuses it, as the function itself does."""
    mod = filled("for i in range(4):\n    out[i] = T.float32(1)")
    kind = relax.TensorType((8,), "float32")
    call = relax.call_tir(mod.get_global_var("make"), relax.Tuple([]), kind)
    bb = relax.BlockBuilder(mod)
    with bb.function("other", []):
        with bb.dataflow():
            result = bb.emit_output(call)
        bb.emit_func_output(result)
    with pytest.raises(ValueError, match="make fills a tensor of shape"):
        FoldConstants()(bb.get())


def test_assertions_of_functions_are_kept():
    stores = """
    for i in range(4):
        out[i] = T.float32(1)
    assert out[0] < T.float32(0), "the number is not negative"
    """
    with with_assertions(), pytest.raises(Exception, match="the number is not negative"):
        FoldConstants()(filled(stores))


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"]
)
def test_fills(dtype):
    """The constant equals that of TVM's pass, in each dtype."""
    value = relax.const(0.1 if "float" in dtype else 1, dtype)

    def body(bb, x):
        return relax.Tuple([x, bb.emit(op.full((3,), value, dtype))])

    legal, result = folded(build([tensor("x", (2,), "float32")], body))
    theirs = relax.transform.FoldConstant()(legal)
    tvm.ir.assert_structural_equal(result["main"], theirs["main"])
