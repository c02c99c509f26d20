"""Kernels take and return tensors with their second and third axes in either order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from calls import build, tensor
from dispatched import HOST, check_dispatch, flat
from programs import build as build_steps
from programs import run
from tvm import relax, tirx
from tvm.ir import Op
from tvm.script import tirx as T

import relax_grad
from relax_grad.ir.dtypes import HALVES
from relax_grad.transform import DispatchKernels

RNG = np.random.default_rng(0)
N, S = (tirx.Var(name, "int64") for name in "ns")
op = relax.op

#: The shapes of queries, keys and values, with the heads before the positions.
SHAPES = [(2, 4, 9, 6), (2, 2, 21, 6), (2, 2, 21, 5)]
#: The permutation of keys with the heads, the features, then the positions.
TURNED = [0, 3, 1, 2]

SYMBOLIC = [(N, 4, S, 6), (N, 2, 21, 6), (N, 2, 21, 5)]


def exchanged(expr):
    return op.permute_dims(expr, [0, 2, 1, 3])


def attention(query, key, value):
    return exchanged(op.nn.attention(*map(exchanged, (query, key, value)), causal_mask="TopLeft"))


def module_of(shapes, dtype="float32"):
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    return build(params, attention)


def gradient_of(module):
    module = relax_grad.vjp(module, "main", [0, 1, 2])
    module = relax.transform.DeadCodeElimination(["main_vjp"])(module)
    del module["main"]
    return module


def values_of(*shapes):
    return [RNG.normal(size=shape).astype("float32") for shape in shapes]


def permutations_in(module):
    """Return the number of permutations that remain beside kernels."""
    return operators_in(module, "relax.permute_dims")


def operators_in(module, name):
    """Return the number of calls of an operator that remain beside kernels and are used."""
    dispatched = relax.transform.CanonicalizeBindings()(DispatchKernels(HOST)(module))
    dispatched = relax.transform.DeadCodeElimination()(dispatched)
    return sum(
        isinstance(binding.value, relax.Call) and binding.value.op == Op.get(name)
        for _, function in dispatched.functions_items()
        if isinstance(function, relax.Function)
        for block in function.body.blocks
        for binding in block.bindings
    )


@pytest.mark.parametrize("shapes", [SHAPES, SYMBOLIC], ids=["static", "symbolic"])
def test_attention_and_its_gradient_have_no_permutation(shapes):
    module = gradient_of(module_of(shapes))
    assert permutations_in(module) == 0
    kernels = ["nn_attention_kernel", "grad_attention_backward_kernel"]
    check_dispatch(module, "main_vjp", values_of(*SHAPES, (2, 4, 9, 5)), kernels)


def test_half_precision():
    assert permutations_in(module_of(SHAPES, "bfloat16")) == 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shapes", [SHAPES, SYMBOLIC], ids=["static", "symbolic"])
def test_gradients_in_half_precision_are_exchanged_behind_their_casts(shapes, dtype):
    module = gradient_of(module_of(shapes, dtype))
    assert permutations_in(module) == 0
    assert operators_in(module, "relax.astype") == 0
    half = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = [value.astype(half) for value in values_of(*SHAPES, (2, 4, 9, 5))]
    results = run(module, "main_vjp", *values, target=HOST, pipeline="relax_grad")
    wide = gradient_of(module_of(shapes))
    wanted = run(wide, "main_vjp", *(value.astype("float32") for value in values))
    error = 2 * float(ml_dtypes.finfo(half).eps)
    for narrow, exact in zip(flat(results), flat(wanted), strict=True):
        assert narrow.dtype == half
        assert narrow.shape == exact.shape
        assert np.abs(narrow.astype("float32") - exact).max() <= error * np.abs(exact).max()


def test_a_cast_result_in_both_orders_is_permuted_once():
    """A result of float32 that is only cast, and whose cast is used in both orders."""
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(SHAPES)]

    def body(bb, *tensors):
        result = bb.emit(op.nn.attention(*map(exchanged, tensors)))
        narrow = bb.emit(op.astype(result, "float16"))
        return relax.Tuple([bb.emit(exchanged(narrow)), bb.emit(op.exp(narrow))])

    module = build_steps(params, body)
    assert permutations_in(module) == 1
    assert operators_in(module, "relax.astype") == 0
    check_dispatch(module, "main", values_of(*SHAPES), ["nn_attention_kernel"], rtol=2e-3)


def test_a_cast_beside_another_use_is_permuted_afterwards():
    """The kernel does not round a result that is also used in float32."""
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(SHAPES)]

    def body(bb, *tensors):
        result = bb.emit(op.nn.attention(*map(exchanged, tensors)))
        narrow = bb.emit(op.astype(result, "float16"))
        return relax.Tuple([bb.emit(exchanged(narrow)), bb.emit(op.exp(result))])

    module = build_steps(params, body)
    assert permutations_in(module) == 1
    check_dispatch(module, "main", values_of(*SHAPES), ["nn_attention_kernel"], rtol=2e-3)


def test_some_tensors_have_the_positions_first():
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(SHAPES)]
    params[1] = tensor("x1", (2, 21, 2, 6), "float32")
    module = build(
        params, lambda query, key, value: op.nn.attention(exchanged(query), key, exchanged(value))
    )
    assert permutations_in(module) == 0
    shapes = [SHAPES[0], (2, 21, 2, 6), SHAPES[2]]
    check_dispatch(module, "main", values_of(*shapes), ["nn_attention_kernel"])


def test_a_result_in_both_orders_is_permuted_once():
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(SHAPES)]

    def body(bb, *tensors):
        result = bb.emit(op.nn.attention(*map(exchanged, tensors)))
        return relax.Tuple([bb.emit(exchanged(result)), bb.emit(op.exp(result))])

    module = build_steps(params, body)
    assert permutations_in(module) == 1
    check_dispatch(module, "main", values_of(*SHAPES), ["nn_attention_kernel"])


@pytest.mark.parametrize("extents", [(2, 9, 21), (N, S, 21)], ids=["static", "symbolic"])
def test_keys_with_the_features_before_the_positions(extents):
    batch, queries, keys = extents
    shapes = [(batch, queries, 4, 6), (batch, 2, 6, keys), (batch, keys, 2, 5)]
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]

    def body(query, key, value):
        return op.nn.attention(query, op.permute_dims(key, TURNED), value)

    module = build(params, body)
    assert permutations_in(module) == 0
    module = gradient_of(module)
    assert permutations_in(module) == 0
    kernels = ["nn_attention_kernel", "grad_attention_backward_kernel"]
    values = values_of((2, 9, 4, 6), (2, 2, 6, 21), (2, 21, 2, 5), (2, 9, 4, 5))
    check_dispatch(module, "main_vjp", values, kernels)


def test_keys_in_half_precision_with_the_features_before_the_positions():
    shapes = [(2, 9, 4, 6), (2, 2, 6, 21), (2, 21, 2, 6)]
    params = [tensor(f"x{i}", shape, "bfloat16") for i, shape in enumerate(shapes)]

    def body(query, key, value):
        return op.nn.attention(query, op.permute_dims(key, TURNED), value)

    assert permutations_in(build(params, body)) == 0


def test_other_permutations_stay():
    params = [
        tensor(f"x{i}", shape, "float32") for i, shape in enumerate([(2, 9, 4, 6), (2, 4, 6, 21)])
    ]

    def body(query, key):
        value = op.permute_dims(key, TURNED)
        key = op.permute_dims(op.exp(key), [0, 3, -3, 2])
        return op.permute_dims(op.nn.attention(query, key, value), TURNED)

    module = build(params, body)
    assert permutations_in(module) == 2  # of the values and the result
    check_dispatch(module, "main", values_of((2, 9, 4, 6), (2, 4, 6, 21)), ["nn_attention_kernel"])


def test_two_permutations_after_each_other_are_none():
    module = build(
        [tensor("x", SHAPES[0], "float32")], lambda x: exchanged(exchanged(exchanged(x)))
    )
    assert permutations_in(module) == 1
    check_dispatch(module, "main", values_of(SHAPES[0]), [])
    module = build([tensor("x", SHAPES[0], "float32")], lambda x: exchanged(exchanged(x)))
    assert permutations_in(module) == 0
    check_dispatch(module, "main", values_of(SHAPES[0]), [])


def test_a_tensor_that_is_overwritten_before_the_kernel_is_permuted_first():
    @T.prim_func(private=True, s_tir=True)
    def double(a: T.Buffer((2, 4, 9, 6), "float32")):
        for i, j, k, m in T.grid(2, 4, 9, 6):
            with T.sblock("double"):
                vi, vj, vk, vm = T.axis.remap("SSSS", [i, j, k, m])
                a[vi, vj, vk, vm] = a[vi, vj, vk, vm] * T.float32(2)

    bb = relax.BlockBuilder()
    callee, data = bb.add_func(double, "double"), tensor("x", (2, 4, 9, 6), "float32")
    with bb.function("main", [data]):
        with bb.dataflow():
            copy = bb.emit(op.exp(data))
            before = bb.emit(exchanged(copy))
            written = bb.emit(op.call_tir_inplace(callee, relax.Tuple([copy]), [0], data.ty))
            result = bb.emit(exchanged(op.nn.attention(before, before, before)))
            both = bb.emit_output(relax.Tuple([result, written]))
        bb.emit_func_output(both)
    assert permutations_in(bb.get()) == 2
    check_dispatch(bb.get(), "main", values_of((2, 4, 9, 6)), ["nn_attention_kernel", "double"])
