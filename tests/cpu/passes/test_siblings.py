"""Element-wise loops that share inputs become one loop (horizontal fusion)."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from calls import build, tensor
from dispatched import flat, run_both
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.backend.cpu_generic import pipeline as stages
from tvm_ffi import structural_equal

import relax_grad
from relax_grad.ir.module import is_buffer
from relax_grad.transform import FuseSiblings

RNG = np.random.default_rng(0)
HOST = relax_grad.target.host()
N = tirx.Var("n", "int64")


def calls(module):
    """Return the number of results of each call in ``main`` after legalization and fusion."""
    with HOST:
        legalized = tvm.transform.Sequential(stages.legalize_passes(HOST))(module)
        merged = FuseSiblings(HOST)(legalized)
    assert relax.analysis.check_well_formed(merged)
    functions = [each for each in merged.functions.values() if isinstance(each, tirx.PrimFunc)]
    params = [param for function in functions for param in function.params if is_buffer(param)]
    assert {str(extent.ty.dtype) for param in params for extent in param.shape} == {"int64"}
    return [
        len(binding.value.ty.fields) if isinstance(binding.value.ty, relax.TupleType) else 1
        for block in merged["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]


def optimizer(kind, shapes):
    instance = getattr(relax.training.optimizer, kind[0])(0.1, **kind[1])
    instance.init([tensor(f"p{i}", shape, "float32") for i, shape in enumerate(shapes)])
    function = instance.get_function().with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function}), instance.state


@pytest.mark.parametrize(
    ("kind", "results"),
    [
        (("SGD", {}), 1),
        (("MomentumSGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}), 2),
        (("Adam", {}), 3),
    ],
    ids=["SGD", "MomentumSGD", "Adam"],
)
def test_an_update_is_one_loop_for_each_parameter(kind, results):
    shapes = [(60, 70), (33,)]
    module, state = optimizer(kind, shapes)
    counts = calls(module)
    assert [n for n in counts if n > 1] == [results] * (2 * (results > 1))
    assert len(counts) <= 2 + 3  # a few common counters and products
    params, gradients = (
        [RNG.normal(size=shape).astype("float32") for shape in shapes] for _ in range(2)
    )
    arrays = [[tvm.runtime.tensor(array) for array in group] for group in (params, gradients)]
    numbers = []
    for pipeline in ("relax_grad", "default"):
        machine = relax.VirtualMachine(
            tvm.compile(module, HOST, relax_pipeline=pipeline), tvm.cpu()
        )
        result = machine["main"](*map(tvm.runtime.convert, (*arrays, list(state))))
        numbers.append([array.numpy() for group in result for array in group])
    for ours, stock in zip(*numbers, strict=True):
        np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-7)


def shared(bb, x, y):
    """Return two results whose only common operand is one value."""
    both = bb.emit(op.tanh(op.multiply(x, y)))
    return bb.emit(op.add(both, x)), bb.emit(op.matmul(bb.emit(op.subtract(both, y)), y))


def later(bb, x, y):
    """Return two element-wise values of the same inputs; the second depends on a sum of the
    first."""
    first = bb.emit(op.add(x, y))
    total = bb.emit(op.sum(first, [0]))
    return first, bb.emit(op.multiply(bb.emit(op.multiply(x, y)), total))


def beside(bb, x, y):
    """Return two element-wise values of the same inputs."""
    return bb.emit(op.multiply(op.tanh(x), y)), bb.emit(op.subtract(x, y))


def unrelated(bb, x, y):
    return bb.emit(op.exp(x)), bb.emit(op.exp(y))


@pytest.mark.parametrize(
    ("body", "results", "rows"),
    [
        *((shared, 2, 32), (beside, 2, 32), (later, 1, 32), (unrelated, 1, 32)),
        *((beside, 2, N), (later, 1, N), (unrelated, 1, N)),
    ],
)
def test_functions_with_shared_operands_are_fused(body, results, rows):
    bb = relax.BlockBuilder()
    params = [tensor("x", (rows, 32), "float32"), tensor("y", (32, 32), "float32")]
    if body is not shared:
        params[1] = tensor("y", (rows, 32), "float32")
    with bb.function("main", params):
        with bb.dataflow():
            outputs = bb.emit_output(relax.Tuple(body(bb, *params)))
        bb.emit_func_output(outputs)
    module = bb.get()
    assert max(calls(module)) == results
    values = [RNG.normal(size=(32, 32)).astype("float32") for _ in params]
    for ours, stock in zip(*map(flat, run_both(module, "main", values)), strict=True):
        np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-5)


def test_no_target_of_llvm_no_change():
    module = build([tensor("x", (4,), "float32")], op.exp)
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    assert structural_equal(FuseSiblings(target)(module), module)
