"""Operators are legalized as in TVM, but only once for operands of equal types."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import build, tensor
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

from relax_grad.cpu.passes import legalize
from relax_grad.cpu.passes.legalize import legalize_ops

N = tirx.Var("n", "int64")


def mixed(bb, x, y, row, half, symbolic):
    """Return calls with equal types, other shapes and dtypes, scalars, and one operand twice."""
    two, three = (relax.const(np.float32(value)) for value in (2, 3))
    results = [
        op.add(x, y),
        op.add(y, x),
        op.add(x, x),
        op.multiply(x, y),
        op.add(x, row),
        op.add(row, x),
        op.add(row, row),
        op.add(half, half),
        op.multiply(x, two),
        op.multiply(y, two),
        op.multiply(y, three),
        op.multiply(two, y),
        op.multiply(two, row),
        op.subtract(two, three),
        op.add(x, relax.const(np.ones((4, 3), "float32"))),
        op.divide(symbolic, symbolic),
        op.divide(symbolic, two),
        op.maximum(x, y),
        op.sqrt(x),
        op.sqrt(y),
        op.where(op.less(x, y), x, y),
        op.where(op.less(y, x), y, x),
        op.reshape(x, (12,)),
        op.reshape(y, (12,)),
        op.reshape(x, (3, 4)),
        op.reshape(symbolic, (N * 3,)),
        op.permute_dims(x, [1, 0]),
        op.permute_dims(y, [1, 0]),
        op.permute_dims(x, [0, 1]),
    ]
    return relax.Tuple([bb.emit(result) for result in results])


def module():
    params = [
        tensor("x", (4, 3), "float32"),
        tensor("y", (4, 3), "float32"),
        tensor("row", (3,), "float32"),
        tensor("half", (3,), "float16"),
        tensor("symbolic", (N, 3), "float32"),
    ]
    return build(params, mixed)


@pytest.fixture
def asked(monkeypatch):
    """The operators of the calls that TVM legalizes after this point."""
    names = []

    def counted(legalize):
        def run(bb, call):
            names.append(call.op.name)
            return legalize(bb, call)

        return run

    made = legalize._Shared
    monkeypatch.setattr(legalize, "_Shared", lambda known: made(counted(known)))
    return names


def test_the_module_is_that_of_tvm(asked):
    mod = module()
    legal, wanted = legalize_ops(mod), relax.transform.LegalizeOps()(mod)
    tvm.ir.assert_structural_equal(legal, wanted)
    assert legal.script() == wanted.script()
    assert asked.count("relax.add") == 6  # of 8: x + y, y + x and x + x share one
    assert asked.count("relax.multiply") == 5  # of 6: the two by 2 on the right share one
    assert asked.count("relax.sqrt") == asked.count("relax.where") == asked.count("relax.less") == 1
    assert asked.count("relax.reshape") == 3  # of 4
    assert asked.count("relax.permute_dims") == 2  # of 3


def test_another_legalization_is_asked_each_time():
    calls = []

    def legalize(bb, call):
        calls.append(call)
        return bb.call_te(tvm.topi.add, *call.args, primfunc_name_hint=f"own{len(calls)}")

    before = Op.get("relax.add").get_attr("FLegalize")
    tvm.ir.register_op_attr("relax.add", "FLegalize", legalize, 20)
    try:
        x = tensor("x", (4, 3), "float32")
        legalize_ops(build([x], lambda bb, x: op.add(x, bb.emit(op.add(x, x)))))
    finally:
        Op.get("relax.add").reset_attr("FLegalize")
        tvm.ir.register_op_attr("relax.add", "FLegalize", before)
    assert len(calls) == 2
