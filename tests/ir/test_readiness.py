"""The order of bindings in which some results are ready early."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from relax_grad.ir.bindings import bindings_of
from relax_grad.ir.readiness import in_order_of_readiness


def test_bindings_of_one_result_come_behind_their_operands():
    """The sum of a, and its square, are used for r only; b is used for r and s."""
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        a = bb.emit(op.sin(x), "a")
        b = bb.emit(op.cos(a), "b")
        c = bb.emit(op.exp(b), "c")
        d = bb.emit(op.sum(a), "d")
        e = bb.emit(op.multiply(d, d), "e")
        r = bb.emit(op.add(e, e), "r")
        s = bb.emit(op.sum(c), "s")
        bb.emit_func_output(relax.Tuple([r, s, b]))
    bindings = list(bindings_of(bb.get()["main"].body))[:7]
    order = in_order_of_readiness(bindings, [r, s], [b])
    assert [binding.var.name for binding in order] == ["a", "d", "e", "r", "b", "c", "s"]
    # A result that others use is ready early too, and these uses are not.
    order = in_order_of_readiness(bindings, [d], [r, s, b])
    assert [binding.var.name for binding in order] == ["a", "d", "b", "c", "e", "r", "s"]
    assert in_order_of_readiness(bindings, [], [r, s, b]) == bindings
