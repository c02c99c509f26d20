"""Tensor functions that are refused by the name of the block."""

from __future__ import annotations

import pytest
from tensor_functions import module_of, tensor
from tvm import relax
from tvm.script import tirx as T

import relax_grad
from relax_grad.errors import GradientError
from relax_grad.tir import adjoint

pytestmark = pytest.mark.core


@T.prim_func(s_tir=True)
def endless(A: T.Buffer((2,), "float64"), Y: T.Buffer((2,), "float64")):
    with T.sblock("search"):
        Y[0] = A[0]
        while Y[0] < 1.0:
            Y[0] = Y[0] * 2.0


@T.prim_func(s_tir=True)
def with_effects(A: T.Buffer((2,), "float64"), Y: T.Buffer((2,), "float64")):
    for i in range(2):
        with T.sblock("effect"):
            vi = T.axis.spatial(2, i)
            Y[vi] = A[vi]
            T.evaluate(T.call_extern("int32", "printf", "x"))


@T.prim_func(s_tir=True)
def unknown(A: T.Buffer((2,), "float64"), Y: T.Buffer((2,), "float64")):
    for i in range(2):
        with T.sblock("gamma"):
            vi = T.axis.spatial(2, i)
            Y[vi] = T.call_extern("float64", "tgamma", A[vi])


@T.prim_func(s_tir=True)
def bits(A: T.Buffer((2,), "float64"), Y: T.Buffer((2,), "float64")):
    for i in range(2):
        with T.sblock("bits"):
            vi = T.axis.spatial(2, i)
            Y[vi] = T.Cast("float64", T.reinterpret("int64", A[vi]) + T.int64(1))


@T.prim_func(s_tir=True)
def bits_in_a_buffer(A: T.Buffer((2,), "float64"), Y: T.Buffer((2,), "float64")):
    B = T.sblock_alloc_buffer((2,), "int64")
    for i in range(2):
        with T.sblock("take"):
            vi = T.axis.spatial(2, i)
            B[vi] = T.reinterpret("int64", A[vi] * 2.0)
    for i in range(2):
        with T.sblock("give"):
            vi = T.axis.spatial(2, i)
            Y[vi] = T.reinterpret("float64", B[vi])


REFUSED = {
    "bits": bits,
    "give": bits_in_a_buffer,
    "search": endless,
    "effect": with_effects,
    "gamma": unknown,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_block(name):
    with pytest.raises(GradientError, match=f"block '{name}'"):
        adjoint(REFUSED[name])


def test_missing_gradients_name_the_block():
    def call(bb, callee, x):
        return bb.emit(relax.op.call_tir(callee, [x], tensor(2)))

    module = module_of(endless, call, tensor(2))
    with pytest.raises(GradientError, match=r"(?s)binding 'lv'.*block 'search'"):
        relax_grad.vjp(module)
    (missing,) = relax_grad.missing_gradients(module)
    assert "block 'search'" in missing.reason
    assert missing.reason.endswith("with relax.op.call_tir_with_grad")
