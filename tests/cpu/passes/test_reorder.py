"""The order of bindings: the same values, with less peak memory."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import HOST
from programs import build, is_sound, tensor, to_numpy
from steps import DEPTH, WIDTH, late, layers, step_of
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax import op
from tvm_ffi import structural_equal

from relax_grad.cpu.passes.reorder import Tensors
from relax_grad.transform import InlineSingleUse, ReorderForPeakMemory

RNG = np.random.default_rng(0)


def values(rows=64):
    shapes = [(rows, WIDTH), *[(WIDTH, WIDTH)] * DEPTH]
    return [RNG.normal(size=shape).astype("float32") for shape in shapes]


def results(module, name, arrays):
    """Return the results of a function as TVM compiles it."""
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    return flat(to_numpy(machine[name](*map(tvm.runtime.tensor, arrays))))


def flat(value):
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


def assert_same(module, other, name, arrays):
    for result, wanted in zip(
        results(other, name, arrays), results(module, name, arrays), strict=True
    ):
        np.testing.assert_array_equal(result, wanted)


def peak(module, name):
    """Return the peak memory, in bytes, of the results of a function's bindings."""
    (block,) = module[name].body.blocks
    return Tensors(block.bindings).peak(range(len(block.bindings)))


def planned(module, name, passes=()):
    """Return the bytes of storage that TVM plans for a function after some passes."""
    stages = tvm.transform.Sequential(
        [
            relax.transform.LegalizeOps(),
            *passes,
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite(),
            relax.transform.StaticPlanBlockMemory(),
        ]
    )
    with HOST:
        function = stages(module)[name]
    return sum(
        int(binding.value.args[0].values[0])
        for block in function.body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
        and getattr(binding.value.op, "name", "") == "relax.memory.alloc_storage"
    )


@pytest.mark.parametrize("rows", [64, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_order(rows):
    module = late(rows)
    ordered = ReorderForPeakMemory()(module)
    is_sound(ordered)
    assert peak(ordered, "main") < 0.8 * peak(module, "main")
    assert_same(module, ordered, "main", values()[:1])


def test_order_plans_less():
    module = late()
    assert planned(module, "main", [ReorderForPeakMemory()]) < 0.8 * planned(module, "main")


def test_returned_tensors_stay_and_views_count_once():
    def body(bb, x):
        y = bb.emit(op.exp(x))
        flat_y = bb.emit(op.reshape(y, (32,)))
        parts = bb.emit(relax.Tuple([flat_y, y]))
        return op.sum(relax.TupleGetItem(parts, 0))

    module = build([tensor("x", (4, 8), "float32")], body)
    assert peak(module, "main") == 4 * 8 * 4 + 4
    tvm.ir.assert_structural_equal(ReorderForPeakMemory()(module), module)


def test_a_function_with_a_match_cast_is_not_reordered():
    module = layers()
    function = module["main_adjoint"]
    (block,) = function.body.blocks
    x = function.params[0]
    cast = relax.MatchCast(relax.DataflowVar("cast", x.ty), x, x.ty)
    blocks = [relax.DataflowBlock([cast, *block.bindings])]
    module["main_adjoint"] = relax.Function(
        function.params, relax.SeqExpr(blocks, function.body.body), function.ret_ty, True
    )
    tvm.ir.assert_structural_equal(ReorderForPeakMemory()(module), module)


@pytest.mark.parametrize("rows", [64, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_inline(rows):
    module = step_of(layers(rows))
    inlined = InlineSingleUse()(module)
    is_sound(inlined)
    assert inlined.get_global_vars() == module.get_global_vars()  # others may call it
    assert peak(inlined, "step") > peak(module, "step")
    assert_same(module, inlined, "step", values())


def test_inlined_gradients_die():
    module = step_of(layers())
    inlined = ReorderForPeakMemory()(InlineSingleUse()(module))
    sizes = DEPTH * WIDTH * WIDTH * 4
    gradients = planned(module, "main_adjoint", [ReorderForPeakMemory()]) + sizes
    assert planned(inlined, "step", [ReorderForPeakMemory()]) < gradients


def test_private_functions_go():
    module = step_of(layers())
    module["main_adjoint"] = module["main_adjoint"].without_attr("global_symbol")
    inlined = InlineSingleUse()(module)
    assert {variable.name_hint for variable in inlined.get_global_vars()} == {"main", "step"}
    assert_same(module, inlined, "step", values())


def test_inlined_through_each_other():
    bb = relax.BlockBuilder()
    for name, callee in (("inner", None), ("middle", "inner"), ("outer", "middle")):
        x = tensor("x", (tirx.Var("n", "int64"), 4), "float32")
        with bb.function(name, [x]):
            with bb.dataflow():
                y = bb.emit(op.exp(x))
                if callee is not None:
                    y = bb.emit(relax.Call(bb.get().get_global_var(callee), [y]))
                y = bb.emit_output(op.add(y, x))
            bb.emit_func_output(y)
    module = bb.get()
    inlined = InlineSingleUse()(module)
    is_sound(inlined)
    for name in ("middle", "outer"):
        calls = [b.value for b in inlined[name].body.blocks[0].bindings]
        assert not any(isinstance(call.op, tvm.ir.GlobalVar) for call in calls)
        assert_same(module, inlined, name, [RNG.normal(size=(3, 4)).astype("float32") * 0.1])


def called_with(kind, wanted, times=1):
    """Return a module in which a caller passes a tensor of one type to a function of another."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", wanted)
    with bb.function("callee", [x]):
        with bb.dataflow():
            y = bb.emit_output(op.exp(x))
        bb.emit_func_output(y)
    callee = bb.get().get_global_var("callee")
    x = relax.Var("x", kind)
    with bb.function("caller", [x]):
        with bb.dataflow():
            y = x
            for _ in range(times):
                y = bb.emit(relax.Call(callee, [x]))
            y = bb.emit_output(op.exp(y))
        bb.emit_func_output(y)
    return bb.get()


def test_calls_that_stay():
    known = relax.TensorType((3,), "float32")
    vague = relax.TensorType(None, "float32", ndim=1)
    twice = called_with(known, known, times=2)
    checked = called_with(vague, known)
    for module in (twice, checked):
        tvm.ir.assert_structural_equal(InlineSingleUse()(module), module)
    module = called_with(known, known)
    assert not structural_equal(InlineSingleUse()(module), module)
