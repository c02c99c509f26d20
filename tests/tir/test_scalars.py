"""Buffers of one number that become variables before a function is differentiated."""

from __future__ import annotations

import pytest
from tvm import tirx

from relax_grad.tir.scalars import with_bindings
from relax_grad.tir.statements import Bind, If, Loop, Store

ZERO = tirx.IntImm("int32", 0)
X, Y, PART = (
    tirx.decl_buffer((extent,), "float32", name, layout=None)
    for extent, name in ((8, "x"), (8, "y"), (1, "part"))
)
AXIS = tirx.Var("i", "int32")
PUT = Store(PART, (ZERO,), tirx.BufferLoad(X, [AXIS]))
GET = Store(Y, (AXIS,), tirx.exp(tirx.BufferLoad(PART, [ZERO])))
TRUE = tirx.BufferLoad(X, [ZERO]) > 0


def loop(*body):
    return Loop(AXIS, ZERO, tirx.IntImm("int32", 8), body)


@pytest.mark.parametrize(
    "statements",
    [(PUT, GET), (loop(PUT, GET),), (loop(PUT, If(TRUE, (GET,), (GET,))),)],
    ids=["straight", "loop", "branch"],
)
def test_a_store_before_all_loads_becomes_a_binding(statements):
    changed, numbers = with_bindings(statements, [PART])
    assert numbers == {PART}
    inner = changed if len(statements) > 1 else changed[0].body
    assert isinstance(inner[0], Bind)
    assert "part" in str(inner[0].var)
    assert PART not in {s.buffer for s in inner if isinstance(s, Store)}


@pytest.mark.parametrize(
    "statements",
    [
        (loop(GET, PUT),),
        (loop(PUT), GET),
        (loop(If(TRUE, (PUT,)), GET),),
        (PUT, GET, PUT),
        (GET,),
    ],
    ids=["of the last iteration", "after a loop", "after a branch", "twice", "never"],
)
def test_other_buffers_stay(statements):
    changed, numbers = with_bindings(statements, [PART])
    assert numbers == set()
    assert list(map(str, changed)) == list(map(str, statements))


def test_larger_and_integer_buffers_stay():
    indices = tirx.decl_buffer((1,), "int32", "indices", layout=None)
    put = Store(indices, (ZERO,), AXIS)
    assert with_bindings((put, Store(X, (ZERO,), TRUE), GET), [indices, X])[1] == set()
