"""The pairs of an operand and a result of a scheduled kernel that may share memory."""

from __future__ import annotations

import pytest
import tvm
from compile_cuda import TARGET
from tvm import te, tirx
from tvm.s_tir import dlight

from relax_grad.gpu.in_place import name_pairs
from relax_grad.ir.module import IN_PLACE


def compute(shape, body):
    return te.compute(shape, body, "result")


X = te.placeholder((9, 9), "float32", "x")
ROW = te.placeholder((9,), "float32", "row")
WIDE = te.placeholder((9, 9), "float64", "wide")
K = te.reduce_axis((0, 9), "k")

#: Operands, and a function of them that may be in place (with the pairs), or may not.
CASES = {
    "an element": ([X], compute((9, 9), lambda i, j: X[i, j] * 2.0), [(0, 1)]),
    "an element twice": ([X], compute((9, 9), lambda i, j: X[i, j] * X[i, j]), [(0, 1)]),
    "a broadcast operand": (
        [X, ROW],
        compute((9, 9), lambda i, j: X[i, j] + ROW[j]),
        [(0, 2)],
    ),
    "a transposed operand": ([X], compute((9, 9), lambda i, j: X[j, i] * 2.0), []),
    "a neighbour too": (
        [X],
        compute((9, 9), lambda i, j: X[i, j] + X[i, tirx.min(j + 1, 8)]),
        [],
    ),
    "another dtype": (
        [WIDE],
        compute((9, 9), lambda i, j: WIDE[i, j].astype("float32")),
        [],
    ),
    "a sum": ([X], compute((9,), lambda i: te.sum(X[i, K], axis=K)), []),
    "a row of a sum": (
        [X, ROW],
        compute((9,), lambda i: te.sum(X[i, K] * ROW[i], axis=K)),
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pairs(name):
    operands, result, wanted = CASES[name]
    function = te.create_prim_func([*operands, result]).with_attr("global_symbol", "main")
    rules = dlight.gpu.Reduction(), dlight.gpu.GeneralReduction(), dlight.gpu.Fallback()
    with TARGET:
        scheduled = dlight.ApplyDefaultSchedule(*rules)(tvm.IRModule({"main": function}))
    attributes = name_pairs(scheduled)["main"].attrs
    assert attributes["tirx.is_scheduled"]
    assert [tuple(map(int, pair)) for pair in attributes.get(IN_PLACE, [])] == wanted


def test_functions_without_a_schedule_stay():
    function = te.create_prim_func([X, CASES["an element"][1]])
    module = tvm.IRModule({"main": function})
    assert name_pairs(module).same_as(module)
