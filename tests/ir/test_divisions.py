"""Divisions of integers by 0 raise errors, and no divisor ends the process."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

import relax_grad
from relax_grad.ir.divisions import with_checked_divisions

pytestmark = pytest.mark.core

_DTYPES = ("int8", "int32", "int64", "uint8")
_OPERATORS = ("divide", "floor_divide", "mod", "floor_mod")
_HOST = relax_grad.target.host()


@T.prim_func(s_tir=True, private=True)
def guarded(x: T.Buffer((16,), "int32"), i: T.Buffer((16,), "int32"), y: T.Buffer((16,), "int32")):
    for k in T.vectorized(16):
        with T.sblock("guarded"):
            v = T.axis.spatial(16, k)
            y[v] = T.if_then_else(i[v] != 0, x[v] // i[v], 5) + x[v] % 3


@T.prim_func(s_tir=True, private=True)
def bound(x: T.Buffer((16,), "int32"), i: T.Buffer((16,), "int32"), y: T.Buffer((16,), "int32")):
    for k in range(16):
        with T.sblock("bound"):
            v = T.axis.spatial(16, k)
            d: T.let[T.int32] = i[v] - 1
            q: T.let[T.int32] = x[v] // d
            if x[v] % d == 0:
                y[v] = q
            else:
                y[v] = -q


@T.prim_func(s_tir=True, private=True)
def constant(x: T.Buffer((16,), "int32"), y: T.Buffer((16,), "int32")):
    for k in range(16):
        with T.sblock("constant"):
            v = T.axis.spatial(16, k)
            y[v] = x[v] // 3 + x[v] % 7 + v // 2


@pytest.fixture(scope="module")
def vm():
    bb = relax.BlockBuilder()
    for dtype in _DTYPES:
        kind = relax.TensorType((4, 8), dtype)
        for name in _OPERATORS:
            x, i = relax.Var("x", kind), relax.Var("i", kind)
            with bb.function(f"{name}_{dtype}", [x, i]):
                with bb.dataflow():
                    result = bb.emit_output(getattr(relax.op, name)(x, i))
                bb.emit_func_output(result)
    kind = relax.TensorType((16,), "int32")
    for function in (guarded, bound):
        callee = bb.add_func(function, "f")
        x, i = relax.Var("x", kind), relax.Var("i", kind)
        with bb.function(f"main_{callee.name_hint}", [x, i]):
            with bb.dataflow():
                result = bb.emit_output(relax.op.call_tir(callee, [x, i], kind))
            bb.emit_func_output(result)
    x = relax.Var("x", kind)
    with bb.function("folded", [x]):
        with bb.dataflow():
            seven, zero = relax.const([7] * 16, "int32"), relax.const([0] * 16, "int32")
            quotient = bb.emit(relax.op.floor_divide(seven, zero))
            result = bb.emit_output(relax.op.add(x, relax.op.negative(quotient)))
        bb.emit_func_output(result)
    executable = tvm.compile(bb.get(), _HOST, relax_pipeline="relax_grad")
    return relax.VirtualMachine(executable, tvm.cpu())


def _call(vm, name, *arrays):
    return vm[name](*map(tvm.runtime.tensor, arrays)).numpy()


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", _OPERATORS)
def test_operators(vm, name, dtype):
    info = np.iinfo(dtype)
    numbers = np.array([info.min, info.min + 1, info.max, 7, 0, 1, 100, 3], dtype)
    x = np.tile(numbers, (4, 1))
    divisors = np.array([3, 1, info.max, info.min or 2], dtype)
    if info.min:
        divisors[1] = -1
    i = np.repeat(divisors, 8).reshape(4, 8)
    with np.errstate(all="ignore"):
        quotient, remainder = x // i, x % i
        # A quotient rounded to zero has a remainder with the sign of the dividend.
        if name in ("divide", "mod"):
            quotient, remainder = (
                quotient + ((remainder != 0) & ((x < 0) != (i < 0))),
                np.fmod(x, i),
            )
        least = (x == info.min) & (i == -1) if info.min else np.zeros(x.shape, bool)
        quotient = np.where(least, info.min, quotient).astype(dtype)
    wanted = quotient if "divide" in name else remainder
    np.testing.assert_array_equal(_call(vm, f"{name}_{dtype}", x, i), wanted)
    i[3, 5] = 0
    with pytest.raises(ValueError, match=f"{name}.*divided by 0"):
        _call(vm, f"{name}_{dtype}", x, i)


def test_branches_and_bindings(vm):
    x, i = np.arange(-8, 8, dtype="int32"), np.arange(16, dtype="int32") % 4
    wanted = np.where(i != 0, x // np.maximum(i, 1), 5) + x % 3
    np.testing.assert_array_equal(_call(vm, "main_f", x, i), wanted)
    i[i == 1] = 0  # the divisor is i - 1
    q = x // (i - 1)
    wanted = np.where(x % (i - 1) == 0, q, -q)
    np.testing.assert_array_equal(_call(vm, "main_f1", x, i), wanted)
    i[9] = 1
    with pytest.raises(ValueError, match="f1: an integer is divided by 0"):
        _call(vm, "main_f1", x, i)


def test_constants(vm):
    """A division of constants is an error where it runs, not while it is compiled."""
    with pytest.raises(ValueError, match="divided by 0"):
        _call(vm, "folded", np.zeros(16, "int32"))
    assert with_checked_divisions(constant, "constant").same_as(constant)


@pytest.mark.parametrize("lanes", [2, 4])
def test_vectors(lanes):
    x, y = (tvm.tirx.decl_buffer((8,), "int32", name, layout=None) for name in ("x", "y"))
    k = tvm.tirx.Var("k", "int32")
    ramp = tvm.tirx.Ramp(k * lanes, tvm.tirx.IntImm("int32", 1), lanes)
    load = tvm.tirx.BufferLoad(x, [ramp])
    seven = tvm.tirx.Broadcast(tvm.tirx.IntImm("int32", 7), lanes)
    store = tvm.tirx.BufferStore(y, tvm.tirx.FloorDiv(seven, load), [ramp])
    loop = tvm.tirx.For(k, 0, 8 // lanes, tvm.tirx.ForKind.SERIAL, store)
    function = tvm.tirx.PrimFunc([x, y], loop).with_attr("global_symbol", "main")
    compiled = tvm.compile(with_checked_divisions(function, "vectors"), "llvm")
    value, result = np.array([1, 2, -1, -2, 3, 7, 8, 9], "int32"), np.zeros(8, "int32")
    result = tvm.runtime.tensor(result)
    compiled(tvm.runtime.tensor(value), result)
    np.testing.assert_array_equal(result.numpy(), 7 // value)
    value[6] = 0
    with pytest.raises(ValueError, match="vectors"):
        compiled(tvm.runtime.tensor(value), result)
