"""Casts between float32 and half precision beside kernels, and casts of widened tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from calls import build, tensor
from dispatched import kernels_in
from programs import to_numpy
from tvm import relax
from tvm.relax import op

from relax_grad.cpu.dispatch.registry import operators_in_halves, takes_uncast
from relax_grad.cpu.passes.casts import repeat_casts
from relax_grad.cpu.passes.dispatch import DispatchKernels
from relax_grad.cpu.target import host
from relax_grad.ir.bindings import bindings_of
from relax_grad.training import SGD, memory_of, train_step

HALVES = ["bfloat16", "float16"]
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def casts_in(module: tvm.IRModule) -> int:
    values = (binding.value for binding in bindings_of(module["main"].body))
    return sum(getattr(getattr(v, "op", None), "name", "") == "relax.astype" for v in values)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_kernel_of_softmax_reads_and_stores_half_precision(dtype):
    def body(x):
        bb = relax.BlockBuilder.current()
        wide = bb.emit(op.astype(x, "float32"))
        return op.astype(bb.emit(op.nn.softmax(wide)), dtype)

    module = build([tensor("x", (5, 37), dtype)], body)
    dispatched = DispatchKernels(host())(module)
    assert kernels_in(dispatched) == ["nn_softmax_kernel"]
    assert casts_in(dispatched) == 0
    x = np.random.default_rng(0).normal(size=(5, 37)).astype(NUMPY[dtype])
    executable = tvm.compile(module, host(), relax_pipeline="relax_grad")
    run = relax.VirtualMachine(executable, tvm.cpu())["main"]
    found = to_numpy(run(tvm.runtime.tensor(x))).astype("float64")
    weights = np.exp(x.astype("float64"))
    wanted = weights / weights.sum(-1, keepdims=True)
    # Once rounded: the nearest number of the dtype, up to the error of float32.
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert (np.abs(found - wanted) <= 1.01 * epsilon * wanted + 1e-7).all()


def test_products_and_convolutions_take_operands_that_are_cast_before():
    products = "matmul", "conv", "lstm", "gru", "rnn", "recurrent", "previous_steps"
    in_halves = operators_in_halves()
    assert takes_uncast("relax.nn.softmax")
    assert "relax.matmul" in in_halves
    for name in in_halves:
        assert takes_uncast(name) != any(part in name for part in products), name


def test_each_use_of_a_widened_tensor_has_a_cast():
    def body(x):
        bb = relax.BlockBuilder.current()
        wide = bb.emit(op.astype(x, "float32"))
        one, other = bb.emit(op.exp(wide)), bb.emit(op.sin(wide))
        return op.multiply(one, other)

    module = build([tensor("x", (4, 20), "bfloat16")], body)
    repeated = repeat_casts(module)
    assert (casts_in(module), casts_in(repeated)) == (1, 2)
    once = build([tensor("x", (4, 20), "bfloat16")], lambda x: op.exp(op.astype(x, "float32")))
    assert repeat_casts(once).same_as(once)


def network(dtype: str):
    """Return the step of a network of normalisations and functions that are computed in float32."""
    width = 64
    x = tensor("x", (512, width), dtype)
    weights = [tensor(f"w{i}", (width, width), dtype) for i in range(6)]
    gamma = relax.const(np.ones(width, "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, *weights]):
        with bb.dataflow():
            y = x
            for w in weights:
                y = bb.emit(op.matmul(y, w))
                wide = y if dtype == "float32" else bb.emit(op.astype(y, "float32"))
                wide = bb.emit(op.nn.layer_norm(wide, gamma, gamma, axes=[-1]))
                y = wide if dtype == "float32" else bb.emit(op.astype(wide, dtype))
                wide = y if dtype == "float32" else bb.emit(op.astype(y, "float32"))
                wide = bb.emit(op.nn.gelu(wide))
                y = wide if dtype == "float32" else bb.emit(op.astype(wide, dtype))
            wide = bb.emit(op.astype(y, "float32"))
            loss = bb.emit_output(op.mean(op.square(wide)))
        bb.emit_func_output(loss)
    return train_step(bb.get(), SGD(0.1), wrt=[w.name for w in weights])


@pytest.mark.parametrize("dtype", HALVES)
def test_activations_that_are_computed_in_float32_take_half_the_memory(dtype):
    whole, half = (memory_of(network(kind)).intermediate for kind in ("float32", dtype))
    assert half < 0.6 * whole
