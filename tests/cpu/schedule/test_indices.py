"""Descending indices within a division, which TVM's buffer flattening miscompiles."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import tvm
import tvm_ffi
from sweep import TARGET
from tvm import te, tirx, topi

from relax_grad.cpu.schedule import schedule
from relax_grad.cpu.schedule._indices import as_analyzable
from relax_grad.cpu.target import CPU
from relax_grad.ir.compat import Analyzer

V, W = tirx.Var("v", "int64"), tirx.Var("w", "int64")


def number(value: int) -> tirx.IntImm:
    return tirx.IntImm("int64", value)


def at(expr, v: int, w: int) -> int:
    values = {V: number(v), W: number(w)}
    expr = tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)))
    return int(Analyzer().simplify(expr))


EXPRESSIONS = [
    number(47) - V,
    number(11) - V * 5,
    V * -3,
    number(9) - V * 2 - W,
    number(5) - (V + W) * 3,
    number(3) - V % 4,
    number(7) - V // 2,
    V + W,
    V - W,
    number(11) - V + W,
]


@pytest.mark.parametrize("size", [1, 4, 12])
@pytest.mark.parametrize("number", range(len(EXPRESSIONS)))
def test_the_values_are_the_same(number, size):
    expr = EXPRESSIONS[number]
    for division in (tirx.floordiv(expr, size), tirx.floormod(expr, size)):
        stored = tirx.decl_buffer((1,), "int64")
        function = tirx.PrimFunc([], tirx.BufferStore(stored, division, [0]))
        simple = as_analyzable(function).body.value
        for v in range(-3, 30, 4):
            for w in (0, 1, 7):
                assert at(simple, v, w) == at(division, v, w)


def run(function, *inputs, shape, dtype="float32"):
    result = tvm.runtime.tensor(np.full(shape, 99, dtype))
    compiled = tvm.compile(function.with_attr("global_symbol", "main"), TARGET)
    compiled["main"](*map(tvm.runtime.tensor, inputs), result)
    return result.numpy()


@pytest.mark.parametrize("shape", [(4, 3, 4), (2, 5, 6), (6, 8)])
def test_a_reversed_reshape(shape):
    """After inlining, the indices of the reshape are divisions of a descending iterator."""
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    data = te.placeholder([number(n) for n in shape], "float32")
    function = te.create_prim_func([data, topi.flip(topi.reshape(data, [number(x.size)]), 0)])
    result = run(schedule(function, CPU(4, 16, 2)), x, shape=(x.size,))
    np.testing.assert_array_equal(result, x.reshape(-1)[::-1])


def test_a_remainder_that_descends():
    x = np.arange(12, dtype="float32")
    data = te.placeholder([number(12)], "float32")
    turned = te.compute((48,), lambda i: data[tirx.floormod(11 - i, 12)])
    function = te.create_prim_func([data, turned])
    expected = x[(11 - np.arange(48)) % 12]
    np.testing.assert_array_equal(run(schedule(function, CPU(4, 16, 2)), x, shape=(48,)), expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("compare", [operator.eq, operator.ne, operator.lt, operator.ge])
def test_a_condition_of_an_unsigned_number(compare, dtype):
    """A value that several elements use is bound to a variable, and TVM cannot solve the condition
    for it."""
    x = np.array([1, 3, 2, 9], dtype)
    data = te.placeholder([4], dtype)
    limit, other_value, seven = (tirx.const(value, dtype) for value in (3, 1, 7))

    def chosen(i):
        other = tirx.if_then_else(compare(data[i], limit), other_value, data[i])
        return tirx.Select(i == 0, seven, other)

    choice = te.compute([4], chosen)
    result = te.compute([12], lambda i: choice[tirx.min(i, 1)])
    function = schedule(te.create_prim_func([data, result]), CPU(4, 16, 2))
    assert "alloc_buffer" not in function.script()
    output = run(function, x, shape=(12,), dtype=dtype)
    np.testing.assert_array_equal(output, [7, *[1 if compare(3, 3) else 3] * 11])
