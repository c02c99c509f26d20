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

from relax_grad.cpu.dispatch.registry import may_take_sources
from relax_grad.cpu.passes._casts import narrowed, repeat_casts
from relax_grad.cpu.passes.dispatch import DispatchKernels
from relax_grad.cpu.target import host
from relax_grad.ir.bindings import bindings_of
from relax_grad.training import SGD, memory_of, train_step

HALVES = ["bfloat16", "float16"]
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def wide_norm(x, gamma, beta):
    """Return a layer normalisation in float32 of tensors in half precision, rounded."""
    bb = relax.BlockBuilder.current()
    dtype = str(x.ty.dtype)
    wide = [bb.emit(op.astype(value, "float32")) for value in (x, gamma, beta)]
    return op.astype(bb.emit(op.nn.layer_norm(*wide, axes=[-1])), dtype)


def casts_in(module: tvm.IRModule) -> int:
    values = (binding.value for binding in bindings_of(module["main"].body))
    return sum(getattr(getattr(v, "op", None), "name", "") == "relax.astype" for v in values)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_kernel_reads_and_stores_half_precision_itself(dtype):
    params = [tensor("x", (5, 37), dtype), tensor("g", (37,), dtype), tensor("b", (37,), dtype)]
    module = build(params, wide_norm)
    dispatched = DispatchKernels(host())(module)
    assert kernels_in(dispatched) == ["nn_layer_norm_kernel"]
    assert casts_in(dispatched) == 0
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype(NUMPY[dtype]) for shape in ((5, 37), (37,), (37,))]
    executable = tvm.compile(module, host(), relax_pipeline="relax_grad")
    run = relax.VirtualMachine(executable, tvm.cpu())["main"]
    found = to_numpy(run(*map(tvm.runtime.tensor, values))).astype("float64")
    x, gamma, beta = (value.astype("float64") for value in values)
    centred = x - x.mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gamma + beta
    # Once rounded: the nearest number of the dtype, up to the error of float32.
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert (np.abs(found - wanted) <= 1.01 * epsilon * np.abs(wanted) + 1e-5).all()


def test_a_tensor_with_another_use_stays_in_float32():
    def body(x):
        bb = relax.BlockBuilder.current()
        y = bb.emit(op.nn.softmax(x))
        half = bb.emit(op.astype(y, "bfloat16"))
        return op.add(y, bb.emit(op.astype(half, "float32")))

    module = build([tensor("x", (4, 20), "float32")], body)
    assert narrowed(module["main"]) == {}


def test_a_tensor_that_is_cast_to_two_dtypes_stays_in_float32():
    def body(x):
        bb = relax.BlockBuilder.current()
        y = bb.emit(op.nn.softmax(x))
        one, other = (bb.emit(op.astype(y, dtype)) for dtype in HALVES)
        return relax.Tuple([one, other])

    module = build([tensor("x", (4, 20), "float32")], body)
    assert narrowed(module["main"]) == {}


def test_products_and_convolutions_take_operands_that_are_cast_before():
    assert may_take_sources("relax.nn.layer_norm")
    for name in ("relax.matmul", "relax.nn.conv2d", "relax.grad.conv2d_backward_weight"):
        assert not may_take_sources(name)


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
